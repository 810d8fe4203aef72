"""`fsdp-jax edit` and `inspect --tensor`."""

import json
import tarfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from bridge_helpers import random_tensors, tensors_of, write_llama

from bridge.megatron import open_megatron
from bridge.megatron.read._dcp import open_dcp
from fsdp_jax.cli import main

GOLDEN = Path(__file__).parents[1] / "golden"
BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture(scope="module")
def megatron(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("golden")
    with tarfile.open(GOLDEN / "qwen3_mcore_head.tar.xz") as archive:
        archive.extractall(directory, filter="data")
    return directory / "qwen3_mcore_head/torch_dist"


def test_tensors_are_renamed_dropped_and_cast(tmp_path):
    write_llama(tmp_path / "model")
    words = ["--rename", r"^model\.", "body.", "--drop", "*.2.*", "--drop", "lm_head*"]
    words += ["--cast", "model.norm.*", "bfloat16"]
    assert main(["edit", str(tmp_path / "model"), str(tmp_path / "out"), *words]) == 0
    found, tensors = tensors_of(tmp_path / "out"), random_tensors(np.float32)
    kept = {k for k in tensors if ".2." not in k and not k.startswith("lm_head")}
    assert set(found) == {key.replace("model.", "body.", 1) for key in kept}
    norm = tensors["model.norm.weight"].astype(BF16)
    assert found.pop("body.norm.weight").tobytes() == norm.tobytes()
    for key, values in found.items():
        assert values.tobytes() == tensors[key.replace("body.", "model.", 1)].tobytes()
    assert (tmp_path / "out/config.json").is_file()


def test_what_is_refused_shows_no_progress(tmp_path, capsys):
    write_llama(tmp_path / "model")
    for src, dst in (("model", "model"), ("none", "out")):
        argv = ["edit", str(tmp_path / src), str(tmp_path / dst), "--drop", "*.2.*"]
        assert main(argv) == 2
        assert "writing" not in capsys.readouterr().err


def test_a_checkpoint_of_nothing_is_not_written(tmp_path, capsys):
    write_llama(tmp_path / "model")
    words = ["edit", str(tmp_path / "model"), str(tmp_path / "out"), "--drop", "*"]
    assert main(words) == 2
    assert "leave no tensor" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("rename", [("(", "x"), ("model", r"\9"), ("model", r"\g<x>")])
def test_an_expression_that_is_none_is_named(tmp_path, capsys, rename):
    write_llama(tmp_path / "model")
    words = [
        "edit",
        str(tmp_path / "model"),
        str(tmp_path / "out"),
        "--rename",
        *rename,
    ]
    assert main(words) == 2
    assert repr(rename[0]) in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_keys_of_megatron_are_edited_and_all_else_is_as_it_was(megatron, tmp_path):
    words = ["--rename", "final_layernorm", "final_norm", "--drop", "rng_state*"]
    words += ["--cast", "*.linear_fc2.weight", "float32"]
    assert main(["edit", str(megatron), str(tmp_path / "out"), *words]) == 0
    run, edited = open_megatron(megatron), open_megatron(tmp_path / "out")
    assert edited.args.keys() == run.args.keys() and edited.iteration == run.iteration
    assert any("rng_state" in line for line in run.left_out)
    assert not any("rng_state" in line for line in edited.left_out)
    keys = open_dcp(edited.path).tensors
    assert "decoder.final_norm.weight" in keys
    for key in run.source.keys():
        values = edited.source.read(key)
        assert (values.dtype == np.float32) == key.endswith("linear_fc2.weight")
        assert values.astype(BF16).tobytes() == run.source.read(key).tobytes(), key
    boxes = {k: [t.box for t in x.tiles] for k, x in open_dcp(run.path).tensors.items()}
    for key, tensor in keys.items():
        old = key.replace("final_norm", "final_layernorm")
        assert [tile.box for tile in tensor.tiles] == boxes[old]


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "Nothing to edit"),
        (["--drop", "nothing.*"], "nothing.*"),
        (["--rename", r"\d", "0"], "model.layers.0"),
        (["--cast", "lm_head.weight", "int8"], "int8"),
    ],
)
def test_what_cannot_be_edited_is_one_message(tmp_path, words, message, capsys):
    write_llama(tmp_path / "model")
    assert main(["edit", str(tmp_path / "model"), str(tmp_path / "out"), *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_inspect_prints_one_tensor(megatron, tmp_path, capsys):
    key = "decoder.final_layernorm.weight"
    assert main(["inspect", str(megatron), "--tensor", key, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    values = open_megatron(megatron).source.read(key).astype(np.float64)
    assert (found["shape"], found["dtype"], found["not_finite"]) == (
        [48],
        "bfloat16",
        0,
    )
    assert found["first"] == values[:3].tolist() and found["max"] == values.max()
    write_llama(tmp_path / "model")
    path = str(tmp_path / "model")
    assert main(["inspect", path, "--tensor", "lm_head.weight"]) == 0
    assert "shape: [131, 48]" in capsys.readouterr().out
    assert main(["inspect", path, "--tensor", "lm_head.wait"]) == 2
    assert "lm_head.weight" in capsys.readouterr().err


def test_a_tensor_of_a_run_is_read_once_it_is_exported(trained, capsys):
    assert main(["inspect", str(trained.save), "--tensor", "norm.scale"]) == 2
    assert "fsdp-jax export" in capsys.readouterr().err
