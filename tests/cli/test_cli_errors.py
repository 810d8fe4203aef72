"""Whatever is wrong with the input: one message, status 2, nothing written."""

import json
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import fsdp_jax as fsdp
from fsdp_jax.cli import main
from fsdp_jax.cli._train import Train


@pytest.fixture(scope="session")
def places(tmp_path_factory, llama, text, trained) -> dict[str, str]:
    """Names for what the command lines below speak of; everything there is wrong."""
    folder = tmp_path_factory.mktemp("places")
    (folder / "empty.txt").touch()
    (folder / "short.txt").write_text("too short")
    (folder / "latin.txt").write_bytes(b"caf\xe9 " * 100)
    (folder / "no_metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\nloss 3\n')
    (folder / "later.jsonl").write_text('{"step": 9, "loss": 2.0}\n')
    for name, fields in {
        "unknown": {"model_type": "gpt9"},
        "weightless": json.loads((llama / "config.json").read_text()),
    }.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(fields))
    weights = (llama / "model.safetensors").read_bytes()
    (folder / "unknown" / "model.safetensors").write_bytes(weights)
    (folder / "hollow").mkdir()
    _save_foreign_checkpoint(folder / "foreign")
    named = {path.stem: str(path) for path in folder.iterdir()}
    known = {
        "llama": llama,
        "text": text,
        "run": trained.save,
        "jsonl": trained.metrics,
    }
    return {"here": str(folder), **named, **{k: str(v) for k, v in known.items()}}


def _save_foreign_checkpoint(path: Path):
    plan = fsdp.fully_shard(lambda key: {"w": np.ones((8, 8))}, fsdp.make_mesh())
    params = fsdp.init_params(plan, jax.random.key(0))
    fsdp.save(path, fsdp.init(plan, optax.sgd(0.1), params))


def contents(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


def fails(argv: str, places: dict[str, str], tmp_path: Path, capsys) -> str:
    """The message of a command that must fail as bad input, and leave no trace."""
    names = places | {"new": str(tmp_path / "new")}
    before = contents(Path(places["here"])), contents(tmp_path)
    status = main(argv.format_map(names).split())
    out, err = capsys.readouterr()
    assert status == 2, err
    assert out == ""
    assert err.startswith("fsdp-jax: error: ") and err.count("fsdp-jax: error:") == 1
    assert "Traceback" not in err
    assert (contents(Path(places["here"])), contents(tmp_path)) == before
    return err


START = "train --hf {llama} --data {text} --seq 16 --save {new}"
RESUME = "train --resume {run} --data {text} --save {new}"


@pytest.mark.parametrize(
    "argv, message",
    [
        (
            "train --hf {llama} --data {here}/no --steps 2 --save {new}",
            "no' is not there",
        ),
        ("train --hf {llama} --data {empty} --steps 2 --save {new}", "is empty"),
        ("train --hf {llama} --data {here} --steps 2 --save {new}", "is no file"),
        ("train --hf {llama} --steps 2 --save {new} --data", "at least one file"),
        ("train --hf {llama} --data {short} --steps 2 --save {new}", "holds 9 tokens"),
        ("train --data {text} --steps 2 --save {new}", "--hf MODEL"),
        (
            "train --hf {here}/no --data {text} --steps 2 --save {new}",
            "no path that exists",
        ),
        ("train --hf {hollow} --data {text} --steps 2 --save {new}", "no config.json"),
        ("train --hf {weightless} --data {text} --steps 2 --save {new}", "no safet"),
        ("train --hf {unknown} --data {text} --steps 2 --save {new}", "'gpt9' is not"),
        (START + " --steps 0", "Use more than 0"),
        (START + " --steps 2 --save-every -1", "--save-every -1"),
        (START + " --steps 2 --keep -1", "--keep -1"),
        (START + " --steps 2 --batch 0 --lr nan", "--batch 0: at least 1; --lr nan"),
        (START + " --steps 2 --seed -1", "--seed -1"),
        (START + " --steps 2 --weight-decay -1", "--weight-decay -1"),
        (START + " --steps 2 --batch 6", "6 rows does not divide into 8 data ranks"),
        (START + " --steps 2 --accumulate 2", "8 data ranks x 2 microbatch"),
        (START + " --steps 2 --dp-shard 3", "number of devices, 8"),
        (START + " --steps 2 --dp-outer 0", "sizes are at least 1"),
        (START + " --steps 2 --devices 0", "--devices 0: at least 1"),
        (START + " --steps 2 --devices 9", "there are 8 cpu devices"),
        (START + " --steps 2 --cpu-devices 3", "jax runs already with 8"),
        (START + " --steps 2 --tokenizer model", "needs a tokenizer.json"),
        (START + " --steps 2 --metrics {jsonl}", "exists already"),
        (START + " --steps 2 --metrics {text}/new", "is no directory"),
        (START + " --steps 2 --resume-step 2", "give --resume too"),
        (START + " --steps 2 --callback no_module:f", "cannot be imported"),
        (START + " --steps 2 --profile {text}", "is no directory"),
        (START + " --steps 2 --profile-from 1", "give --profile DIR too"),
        (START + " --steps 2 --profile-steps 1", "give --profile DIR too"),
        (
            START + " --steps 2 --profile {new} --profile-from 3",
            "steps 3 to 3, but the run makes steps 1 to 2",
        ),
        (
            START + " --steps 9 --profile {new} --profile-from 8 --profile-steps 3",
            "steps 8 to 10, but the run makes steps 1 to 9",
        ),
        (START + " --steps 2 --profile {new} --profile-from 0", "makes steps 1 to 2"),
        (START + " --steps 2 --profile {new} --profile-steps 0", "--profile-steps 0"),
        (
            RESUME + " --steps 9 --profile {new} --profile-from 4",
            "steps 4 to 6, but the run makes steps 5 to 9",
        ),
        (
            "train --hf {llama} --data {text} --steps 9 --save {run}",
            "of a run that this command did not begin",
        ),
        ("train --hf {llama} --data {text} --steps 2 --save {text}", "no directory"),
        ("train --resume {new} --data {text} --steps 9 --save {new}", "No checkpoint"),
        (
            "train --resume {hollow} --data {text} --steps 9 --save {new}",
            "holds no committed step",
        ),
        (
            "train --resume {foreign} --data {text} --steps 9 --save {new}",
            "was not saved by `fsdp-jax train`",
        ),
        (RESUME + " --steps 4", "the run starts from step 4"),
        (RESUME + " --steps 9 --resume-step 3", "No step 3"),
        (RESUME + " --steps 9 --batch 16", "--batch 16 (saved with 8)"),
        (RESUME + " --steps 9 --seq 8 --seed 1", "--seq 8 (saved with 16), --seed 1"),
        (
            "train --resume {run} --data {short} --steps 9 --save {new}",
            "gives other tokens",
        ),
        (
            "train --resume {run} --resume-step 2 --data {text} --steps 9 --save {run}",
            "two runs would mix",
        ),
        ("export {new} {new}", "No checkpoint"),
        ("export {hollow} {new}", "no committed step"),
        ("export {foreign} {new}", "was not saved by"),
        ("export {run} {new} --step 3", "No step 3"),
        ("export {run} {llama}", "is not empty"),
        ("export {run} {text}", "is no directory"),
        ("compare {run} {hollow}", "No model config"),
        ("compare {run} {llama} --seq 0", "--seq 0"),
        ("compare {new} {llama}", "no path that exists"),
        ("compare {llama} {llama} --step 1", "has no steps"),
        ("diff-metrics {jsonl} {new}", "No such file"),
        ("diff-metrics {jsonl} {no_metrics}", "line 2, is no JSON object"),
        ("diff-metrics {jsonl} {later}", "share no step"),
        ("make-tiny-llama {llama}", "exists already"),
        ("make-tiny-llama {new} --layers 0 --heads 0", "--layers 0: at least 1; --he"),
        ("make-tiny-llama {new} --hidden 65", "a multiple of 2 x --heads"),
        ("make-tiny-llama {new} --kv-heads 3", "a multiple of --kv-heads 3"),
        ("demo --dir {here}", "is not empty"),
        ("demo --steps 1", "at least 2"),
    ],
)
def test_bad_input_is_one_message(argv, message, places, tmp_path, capsys):
    assert message in fails(argv, places, tmp_path, capsys)


@pytest.mark.parametrize(
    "argv", ["", "trane", "train --steps x", "train", "export one", "demo --no-such"]
)
def test_wrong_usage_has_status_2_too(argv, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(argv.split())
    assert stopped.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_an_interrupt_is_quiet(monkeypatch, capsys):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Train, "run", interrupted)
    assert main("train --data a --steps 1 --save b".split()) == 130
    assert capsys.readouterr() == ("", "")


def test_bytes_need_a_vocabulary_of_256(places, write_llama, tmp_path, capsys):
    small = write_llama(tmp_path / "small", vocab_size=128)
    argv = f"train --hf {small} --data {{text}} --steps 2 --save {{new}}"
    assert "ids up to 255" in fails(argv, places, tmp_path, capsys)


def test_another_vocabulary_is_another_model(places, write_llama, tmp_path, capsys):
    other = write_llama(tmp_path / "other", vocab_size=264)
    message = fails(f"compare {{run}} {other}", places, tmp_path, capsys)
    assert "has a vocabulary of 264, not 256" in message


def test_losses_apart_have_status_1(trained, tmp_path, capsys):
    other = tmp_path / "other.jsonl"
    lines = [json.loads(line) for line in trained.metrics.read_text().splitlines()]
    lines[1]["loss"] *= 1.01
    other.write_text("\n".join(map(json.dumps, lines)))
    assert main(["diff-metrics", str(trained.metrics), str(other)]) == 0
    argv = ["diff-metrics", str(trained.metrics), str(other), "--tolerance", "1e-3"]
    assert main(argv) == 1
    out, err = capsys.readouterr()
    assert "largest relative difference: 0.01" in out
    assert "differ by more than --tolerance 0.001" in err
