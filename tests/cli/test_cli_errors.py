"""Whatever is wrong with the input: one message, status 2, nothing written."""

import json
import re
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from helpers.errors import facts

import fsdp_jax as fsdp
from fsdp_jax.cli import main
from fsdp_jax.cli.commands._train import Train


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
    fsdp.save(path, fsdp.init_state(plan, optax.sgd(0.1), params))


def contents(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


def names_in(places: dict[str, str], tmp_path: Path) -> dict[str, str]:
    return places | {"new": str(tmp_path / "new")}


def fails(argv: str, places: dict[str, str], tmp_path: Path, capsys) -> str:
    """The message of a command that must fail as bad input, and leave no trace."""
    names = names_in(places, tmp_path)
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
    "argv, said",
    [
        (
            "train --hf {llama} --data {here}/no --steps 2 --save {new}",
            ["--data", "'{here}/no'"],
        ),
        (
            "train --hf {llama} --data {empty} --steps 2 --save {new}",
            ["--data", "'{empty}'"],
        ),
        (
            "train --hf {llama} --data {here} --steps 2 --save {new}",
            ["--data", "'{here}'"],
        ),
        ("train --hf {llama} --steps 2 --save {new} --data", ["--data", "1 file"]),
        (
            "train --hf {llama} --data {short} --steps 2 --save {new}",
            ["--data", "9", "--seq 256", "257"],
        ),
        (
            "train --data {text} --steps 2 --save {new}",
            ["--hf MODEL", "--config FILE", "--resume RUN"],
        ),
        (
            "train --hf {here}/no --data {text} --steps 2 --save {new}",
            ["'{here}/no'"],
        ),
        (
            "train --hf {hollow} --data {text} --steps 2 --save {new}",
            ["'{hollow}'", "config.json"],
        ),
        (
            "train --hf {weightless} --data {text} --steps 2 --save {new}",
            ["'{weightless}'", "'model.safetensors'"],
        ),
        ("train --hf {unknown} --data {text} --steps 2 --save {new}", ["'gpt9'"]),
        (
            "train --resume {run} --hf {llama} --data {text} --steps 9 --save {new}",
            ["--hf {llama}", "--resume {run}", "--config FILE"],
        ),
        (START + " --steps 2 --metrics /proc/x", ["--metrics '/proc/x'", "'/proc'"]),
        (
            "train --hf {llama} --data {text} --steps 2 --save /proc/x",
            ["--save '/proc/x'", "'/proc'"],
        ),
        (START + " --steps 2 --prefetch -1", ["--prefetch -1", "0"]),
        (START + " --steps 2 --unroll 0 --zero 4", ["--unroll 0", "1", "--zero 4"]),
        (
            START + " --steps 2 --virtual-stages 2 --schedule 1f1b",
            ["--virtual-stages 2", "--schedule 1f1b", "pp=1"],
        ),
        (START + " --steps 2 --cp-form ring", ["--cp-form ring", "cp=1"]),
        (START + " --steps 2 --outer 1", ["--outer 1", "dp_outer=1"]),
        (
            START + " --steps 2 --local-keep 2",
            ["--local-keep 2", "--local-checkpoints"],
        ),
        (
            START + " --steps 2 --local-checkpoints {new} --local-every 0",
            ["--local-every 0", "1"],
        ),
        ("export {run} {new} --private", ["--private", "--push"]),
        (START + " --steps 0", ["--steps 0", "0"]),
        (START + " --steps 2 --save-every -1", ["--save-every -1"]),
        (START + " --steps 2 --keep -1", ["--keep -1"]),
        (START + " --steps 2 --batch 0 --lr nan", ["--batch 0", "1", "--lr nan"]),
        (START + " --steps 2 --seed -1", ["--seed -1", "2**32"]),
        (START + " --steps 2 --weight-decay -1", ["--weight-decay -1.0"]),
        (START + " --steps 2 --batch 6", ["6", "8", "1"]),
        (START + " --steps 2 --microbatches 2", ["8", "2", "16"]),
        (START + " --steps 2 --dp-shard 3", ["dp_shard=3", "8"]),
        (START + " --steps 2 --dp-outer 0", ["dp_outer=0", "1"]),
        (
            START + " --steps 2 --lora-rank 2 --expert-bias-rate 0.1",
            ["--expert-bias-rate 0.1", "--lora-rank"],
        ),
        (START + " --steps 2 --devices 0", ["--devices 0", "1"]),
        (START + " --steps 2 --devices 9", ["--devices 9", "8", "--cpu-devices 9"]),
        (START + " --steps 2 --cpu-devices 3", ["--cpu-devices 3", "8", "--devices"]),
        (
            START + " --steps 2 --tokenizer model",
            ["--tokenizer model", "tokenizer.json"],
        ),
        (START + " --steps 2 --metrics {jsonl}", ["--metrics '{jsonl}'"]),
        (START + " --steps 2 --metrics {text}/new", ["--metrics", "'{text}'"]),
        (START + " --steps 2 --resume-step 2", ["--resume-step 2", "--resume RUN"]),
        (
            START + " --steps 2 --callback no_module:f",
            ["--callback no_module:f", "'no_module'"],
        ),
        (START + " --steps 2 --profile {text}", ["--profile '{text}'"]),
        (START + " --steps 2 --profile-from 1", ["--profile-from 1", "--profile DIR"]),
        (
            START + " --steps 2 --profile-steps 1",
            ["--profile-steps 1", "--profile DIR"],
        ),
        (
            START + " --steps 2 --profile {new} --profile-from 3",
            ["--profile", "3", "1", "2"],
        ),
        (
            START + " --steps 9 --profile {new} --profile-from 8 --profile-steps 3",
            ["--profile", "8", "10", "1", "9"],
        ),
        (
            START + " --steps 2 --profile {new} --profile-from 0",
            ["--profile", "0", "2", "1"],
        ),
        (
            START + " --steps 2 --profile {new} --profile-steps 0",
            ["--profile-steps 0", "1"],
        ),
        (
            RESUME + " --steps 9 --profile {new} --profile-from 4",
            ["--profile", "4", "6", "5", "9"],
        ),
        (
            "train --hf {llama} --data {text} --steps 9 --save {run}",
            ["--save '{run}'", "4", "--resume {run}"],
        ),
        (
            "train --hf {llama} --data {text} --steps 2 --save {text}",
            ["--save '{text}'"],
        ),
        ("train --resume {new} --steps 9", ["--resume '{new}'", "run.yaml", "--data"]),
        ("train --resume {new} --data {text} --steps 9 --save {new}", ["'{new}'"]),
        (
            "train --resume {hollow} --data {text} --steps 9 --save {new}",
            ["'{hollow}'"],
        ),
        (
            "train --resume {foreign} --data {text} --steps 9 --save {new}",
            ["'{foreign}'", "`fsdp-jax train`"],
        ),
        (RESUME + " --steps 4", ["--steps 4", "4"]),
        (RESUME + " --steps 9 --resume-step 3", ["3", "2, 4", "'{run}'"]),
        (RESUME + " --steps 9 --seq 32", ["--seq 32", "16"]),
        (RESUME + " --steps 9 --seq 8 --seed 1", ["--seq 8", "16", "--seed 1", "0"]),
        (
            "train --resume {run} --data {short} --steps 9 --save {new}",
            ["--data", "4", "'{run}'"],
        ),
        (
            "train --resume {run} --resume-step 2 --data {text} --steps 9 --save {run}",
            ["--save '{run}'", "4", "2"],
        ),
        ("export {new} {new}", ["'{new}'"]),
        ("export {hollow} {new}", ["'{hollow}'"]),
        ("export {foreign} {new}", ["'{foreign}'", "`fsdp-jax train`"]),
        ("export {run} {new} --step 3", ["3", "2, 4", "'{run}'"]),
        ("export {run} {llama}", ["OUT '{llama}'"]),
        ("export {run} {text}", ["OUT '{text}'"]),
        ("compare {run} {hollow}", ["'{hollow}/config.json'"]),
        ("compare {run} {llama} --seq 0", ["--seq 0", "1"]),
        ("compare {new} {llama}", ["'{new}'"]),
        ("compare {llama} {llama} --step 1", ["--step 1", "'{llama}'"]),
        ("diff-metrics {jsonl} {new}", ["'{new}'"]),
        ("generate {run} --prompt a --ignore-field x", ["--ignore-field x", "'{run}'"]),
        ("diff-metrics {jsonl} {no_metrics}", ["'{no_metrics}'", "2"]),
        ("diff-metrics {jsonl} {later}", ["'{jsonl}'", "'{later}'"]),
        ("make-tiny-llama {llama}", ["OUT '{llama}'"]),
        (
            "make-tiny-llama {new} --layers 0 --heads 0",
            ["--layers 0", "--heads 0", "1"],
        ),
        ("make-tiny-llama {new} --hidden 65", ["--hidden 65", "--heads 8"]),
        ("make-tiny-llama {new} --kv-heads 3", ["--kv-heads 3", "--heads 8"]),
        ("demo --dir {here}", ["--dir '{here}'"]),
        ("demo --steps 1", ["--steps 1", "2"]),
    ],
)
def test_bad_input_is_one_message(argv, said, places, tmp_path, capsys):
    names = names_in(places, tmp_path)
    wanted = facts(*(fact.format_map(names) for fact in said))
    assert re.search(wanted, fails(argv, places, tmp_path, capsys))


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
    message = fails(argv, places, tmp_path, capsys)
    assert re.search(facts("--tokenizer", "255", "128"), message)


def test_another_vocabulary_is_another_model(places, write_llama, tmp_path, capsys):
    other = write_llama(tmp_path / "other", vocab_size=264)
    message = fails(f"compare {{run}} {other}", places, tmp_path, capsys)
    assert re.search(facts(f"OUT '{other}'", "264", "256"), message)


def test_a_model_that_lacks_tensors_is_not_compared(places, tmp_path, capsys):
    """transformers draws them at random, so that each run differs by something else."""
    pytest.importorskip("torch")
    drop = ["--drop", "model.layers.0.mlp.*"]
    assert main(["edit", places["llama"], str(tmp_path / "fewer"), *drop]) == 0
    capsys.readouterr()
    message = fails(f"compare {{llama}} {tmp_path / 'fewer'}", places, tmp_path, capsys)
    named = [f"model.layers.0.mlp.{name}_proj.weight" for name in ("down", "gate")]
    assert re.search(facts("3 tensors", *named), message)


def test_weights_of_more_bits_than_the_config_says_are_compared_as_they_are(
    write_llama, tmp_path
):
    pytest.importorskip("torch")
    path = write_llama(tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    said = {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
    (path / "config.json").write_text(json.dumps(config | said))
    assert main(["compare", str(path), str(path), "--devices", "1"]) == 0


@pytest.mark.parametrize("value", ["-1", "nan"])
def test_a_tolerance_is_a_share(trained, value, capsys):
    files = [str(trained.metrics)] * 2
    assert main(["diff-metrics", *files, "--tolerance", value]) == 2
    assert f"--tolerance {value} must" in capsys.readouterr().err


@pytest.mark.parametrize(
    "first, second, status, largest",
    [
        ([0.0, 1.0], [0.0, 1.0], 0, "0"),
        ([0.0, 1.0], [0.5, 1.0], 1, "inf"),
        ([float("nan"), 1.0], [float("nan"), 1.0], 1, "inf"),
        ([1.0, 1.0], [1.0, float("nan")], 1, "inf"),
        ([float("inf"), 1.0], [2.0, 1.0], 1, "inf"),
    ],
)
def test_losses_that_are_zero_or_not_finite_are_compared(
    tmp_path, capsys, first, second, status, largest
):
    files = []
    for name, losses in (("first", first), ("second", second)):
        lines = [{"step": i, "loss": x} for i, x in enumerate(losses, 1)]
        files.append(tmp_path / f"{name}.jsonl")
        files[-1].write_text("\n".join(map(json.dumps, lines)))
    argv = ["diff-metrics", *map(str, files), "--tolerance", "0.1"]
    assert main(argv) == status
    out, err = capsys.readouterr()
    assert f"largest relative difference: {largest}\n" in out
    assert ("in 1 step(s), first in step" in err) == bool(status)


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
