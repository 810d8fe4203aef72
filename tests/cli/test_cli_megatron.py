"""Megatron's checkpoints on the command line: in, out, and from any kind to any."""

import json
import tarfile
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from tiny_configs import hf_fields

import bridge
import fsdp_jax as fsdp
from bridge.models import Decoder
from fsdp_jax._tree import named_leaves
from fsdp_jax.cli import main
from fsdp_jax.cli._decoder import plan_decoder
from fsdp_jax.cli._optimizer import OptimizerConfig

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="module")
def golden(tmp_path_factory) -> Path:
    """What Megatron wrote: bfloat16, tied, with Adam's state and master weights."""
    directory = tmp_path_factory.mktemp("golden")
    with tarfile.open(GOLDEN / "qwen3.tar.xz") as archive:
        archive.extractall(directory, filter="data")
    return directory / "qwen3"


@pytest.fixture(scope="module")
def imported(golden, tmp_path_factory) -> Path:
    """The same as a checkpoint of ours, with Adam's state."""
    path = tmp_path_factory.mktemp("imported") / "run"
    run("import", golden / "torch_dist", path, "--optimizer")
    return path


def write_model(path, variant) -> str:
    config = bridge.from_hf_config(hf_fields(variant))
    model = Decoder(config, rngs=nnx.Rngs(jax.random.key(0)))
    bridge.save_hf(path, nnx.state(model, nnx.Param), config)
    return str(path)


def tensors(path) -> dict[str, bytes]:
    source = bridge.open_checkpoint(path)
    return {key: source.read(key).tobytes() for key in source.keys()}


def run(*argv) -> None:
    assert main([str(arg) for arg in argv]) == 0


@pytest.mark.parametrize("variant", ["llama", "mixtral"])
@pytest.mark.parametrize(
    "to, sizes",
    [
        ("torch_dist", []),
        ("legacy", []),
        ("legacy", ["--tensor-parallel", "2"]),
        ("orbax", []),
    ],
)
def test_there_and_back_is_the_same_model(tmp_path, variant, to, sizes):
    model = write_model(tmp_path / "model", variant)
    run("convert", model, tmp_path / "there", "--to", to, *sizes)
    # Megatron's settings know no tokens; the config beside the original does.
    back = ["convert", tmp_path / "there", tmp_path / "back", "--to", "hf"]
    run(*back, "--config", model)
    assert tensors(tmp_path / "back") == tensors(model)
    assert bridge.from_hf_config(tmp_path / "back") == bridge.from_hf_config(model)


def test_a_model_is_converted_with_the_files_beside_it(write_llama, tmp_path):
    write_llama(tmp_path / "model")
    beside = {"tokenizer.json": "{}", "chat_template.jinja": "{{ messages }}"}
    for name, content in beside.items():
        (tmp_path / "model" / name).write_text(content)
    argv = ["convert", str(tmp_path / "model"), str(tmp_path / "out"), "--to", "hf"]
    assert main(argv) == 0
    for name, content in beside.items():
        assert (tmp_path / "out" / name).read_text() == content


def test_a_file_that_stands_alone_is_what_the_given_config_says(tmp_path):
    model = write_model(tmp_path / "model", "llama")
    alone = (Path(model) / "model.safetensors").rename(tmp_path / "alone.safetensors")
    run("convert", alone, tmp_path / "out", "--to", "hf", "--config", model)
    assert tensors(tmp_path / "out") == tensors(alone)


def test_what_megatron_wrote_becomes_its_hugging_face_twin(golden, tmp_path):
    source, out = golden / "torch_dist", tmp_path / "out"
    run("convert", source, out, "--to", "hf", "--config", golden / "hf")
    assert tensors(out) == tensors(golden / "hf")


def test_one_of_megatrons_formats_becomes_the_other(golden, tmp_path):
    legacy = tmp_path / "legacy"
    run("convert", golden / "torch_dist", legacy, "--to", "legacy")
    a, b = (
        bridge.megatron.open_megatron(path).source
        for path in (golden / "torch_dist", legacy)
    )
    config = bridge.from_hf_config(golden / "hf")
    like = nnx.state(
        nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))), nnx.Param
    )
    want, got = (
        bridge.load_megatron(path, like, config=config)
        for path in (golden / "torch_dist", legacy)
    )
    assert jax.tree.all(jax.tree.map(np.array_equal, got, want))
    assert a.keys() and set(a.keys()) == set(b.keys())


def test_inspect_says_what_is_in_it_and_what_is_left_out(golden, capsys):
    run("inspect", golden / "torch_dist", "--json")
    data = json.loads(capsys.readouterr().out)
    assert data["format"] == "torch_dist" and data["optimizer"] == "Adam"
    assert data["iteration"] > 0 and data["left_out"]
    run("inspect", golden / "legacy")
    out = capsys.readouterr().out
    assert "self_attention.linear_qkv.weight" in out and "format: legacy" in out


def test_an_import_says_what_it_leaves_out(golden, tmp_path, capsys):
    run("import", golden / "torch_dist", tmp_path / "run")
    assert "left out: Adam's state (--optimizer takes it)" in capsys.readouterr().err


def test_training_goes_on_where_megatron_stopped(golden, tmp_path, text, capsys):
    iteration = bridge.megatron.open_megatron(golden / "torch_dist").iteration
    run("import", golden / "torch_dist", tmp_path / "run", "--optimizer")
    capsys.readouterr()
    argv = ["train", "--resume", tmp_path / "run", "--data", text, "--seq", "8"]
    assert main([str(x) for x in (*argv, "--steps", 9, "--save", tmp_path / "m")]) == 2
    assert "--lr: linear to 0.0" in capsys.readouterr().err
    argv += ["--lr", "1e-2"]
    run(*argv, "--steps", iteration + 1, "--save", tmp_path / "more")
    config = fsdp.checkpoint.load_metadata(tmp_path / "more")["train"]
    assert (
        config["optimizer"]["b1"],
        config["optimizer"]["b2"],
        config["optimizer"]["weight_decay"],
    ) == (0.9, 0.95, 0.0)
    assert "norm.scale" in config["optimizer"]["no_decay"].split(",")
    on = json.loads(capsys.readouterr().out)
    assert on["step"] == iteration + 1
    # From the same weights without the moments, the next step's loss differs.
    run("import", golden / "torch_dist", tmp_path / "afresh")
    capsys.readouterr()
    argv = ["train", "--data", text, "--seq", "8", "--lr", "1e-2", "--batch", "8"]
    run(*argv, "--hf", tmp_path / "afresh", "--steps", 2, "--save", tmp_path / "a")
    afresh = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    argv += ["--resume", tmp_path / "run", "--steps", iteration + 2]
    run(*argv, "--save", tmp_path / "b")
    onward = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["step"] for line in onward] == [iteration + 1, iteration + 2]
    assert onward[0]["loss"] == pytest.approx(afresh[0]["loss"], rel=1e-3)
    assert onward[1]["loss"] != pytest.approx(afresh[1]["loss"], rel=1e-6)


def test_an_export_for_megatron_is_the_trained_model(tmp_path):
    model = write_model(tmp_path / "model", "llama")
    run("import", model, tmp_path / "run")
    sizes = ["--megatron", "legacy", "--tensor-parallel", "2"]
    run("export", tmp_path / "run", tmp_path / "megatron", *sizes)
    run(
        "convert",
        tmp_path / "megatron",
        tmp_path / "hf",
        "--to",
        "hf",
        "--config",
        model,
    )
    assert tensors(tmp_path / "hf") == tensors(model)


def test_a_run_goes_back_to_megatron_with_its_optimizer(
    golden, imported, tmp_path, text, capsys
):
    argv = ["train", "--resume", imported, "--data", text, "--seq", "8"]
    argv += ["--lr", "1e-2", "--lr-schedule", "linear", "--lr-steps", "100"]
    iteration = bridge.megatron.open_megatron(golden / "torch_dist").iteration
    run(*argv, "--steps", iteration + 2, "--save", tmp_path / "more")
    capsys.readouterr()
    back = tmp_path / "back"
    run("export", tmp_path / "more", back, "--megatron", "torch_dist", "--optimizer")
    assert "left out: the schedule of --lr (linear)" in capsys.readouterr().err
    written = bridge.megatron.open_megatron(back)
    assert (written.iteration, written.consumed_samples) == (iteration + 2, 8 * 9)
    run("import", back, tmp_path / "again", "--optimizer")
    assert "left out: the place in the data, behind 72" in capsys.readouterr().err

    def leaves(path):
        mesh = fsdp.make_mesh()
        config = bridge.megatron.from_args(written.args)
        plan = plan_decoder(config, mesh)
        like = fsdp.abstract_state(plan, OptimizerConfig().make())
        state = fsdp.load(path, like)
        parts = {"params": state.params, "optimizer": state.opt_state}
        return {name: np.asarray(x) for name, x in named_leaves(parts)}

    before, after = leaves(tmp_path / "more"), leaves(tmp_path / "again")
    kept = {name for name in before if ".mu." in name or ".nu." in name}
    kept |= {name for name in before if name.startswith("params.")}
    assert len(kept) > 30
    for name in kept:
        np.testing.assert_array_equal(after[name], before[name], err_msg=name)
    known = fsdp.checkpoint.load_metadata(tmp_path / "again")["adam"]["known"]
    assert known["lr"] == pytest.approx(1e-2 * (1 - 5 / 100))
    assert (known["b2"], known["clip"]) == (0.95, 0.0)


@pytest.mark.parametrize(
    "argv, message",
    [
        ("export {imported} {out} --megatron legacy --optimizer", "was imported"),
        ("export {imported} {out} --optimizer", "give --megatron"),
        ("export {imported} {out} --consumed-samples 3", "--optimizer too"),
        ("convert {model} {out} --to hf --tensor-parallel 2", "none is written"),
        ("convert {model} {out} --to torch_dist --dtype bfloat16", "--dtype and"),
        ("convert {model} {out} --to legacy --tensor-parallel 3", "3"),
        ("convert {out} {out}2 --to hf", "is not a path that exists"),
        ("convert {model} {model} --to hf", "is not empty"),
        ("convert {hollow} {out} --to hf", "no committed step"),
        ("import {model} {out} --optimizer", "--optimizer needs a Megatron"),
        ("compare {megatron} {model} --step 3 --against bridge", "has no steps"),
    ],
)
def test_bad_input_is_one_message(
    tmp_path, golden, imported, argv, message, capsys, monkeypatch
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "hollow").mkdir()
    places = {
        "model": write_model(tmp_path / "model", "llama"),
        "out": tmp_path / "out",
        "hollow": tmp_path / "hollow",
        "megatron": golden / "torch_dist",
        "imported": imported,
    }
    assert main(argv.format_map(places).split()) == 2
    err = capsys.readouterr().err
    assert message in err and "Traceback" not in err
    assert not (tmp_path / "out").exists()
