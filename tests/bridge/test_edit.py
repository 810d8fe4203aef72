"""Edits of checkpoints: what else of a directory follows them."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from bridge_helpers import write_llama
from helpers.errors import facts
from quantized_writers import torchao
from safetensors.numpy import save_file

import bridge
from bridge.megatron import edit_distributed
from bridge.megatron.read._dcp import open_dcp
from bridge.megatron.write._dcp import DcpWriter

F16, BF16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)


def write_distributed(path: Path, **tensors: np.ndarray) -> Path:
    path.mkdir()
    with DcpWriter(path) as writer:
        for name, values in tensors.items():
            writer.add(name, (0,) * values.ndim, values)
        writer.finish()
    return path


def test_a_cast_of_megatron_makes_no_number_infinite(tmp_path):
    values = np.array([1.0, 1e8], np.float32)
    run = write_distributed(tmp_path / "run", a=values, b=values)
    edits = bridge.Edits(cast=(("b", F16),))
    with pytest.raises(ValueError, match=facts("'b'", "1e+08", "65504", "float16")):
        edit_distributed(run, tmp_path / "out", edits)
    assert not (tmp_path / "out").exists()


def test_nested_entries_of_a_distributed_checkpoint_stay_nested(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    paths = [("model", "a.w"), ("model", "b.w"), ("optim", "state", 0, "step"), ("x",)]
    with DcpWriter(run) as writer:
        for path in paths:
            writer.add_entry(path, np.ones(2, np.float32))
        writer.add_entry(("args", "lr"), 0.1)
        writer.finish()
    edits = bridge.Edits(rename=(("model.a", "model.c"), ("^x", "y")), drop=("*.b.w",))
    edit_distributed(run, tmp_path / "out", edits)
    assert open_dcp(tmp_path / "out/release").paths == {
        "model.c.w": ("model", "c.w"),
        "optim.state.0.step": ("optim", "state", 0, "step"),
        "y": ("y",),
        "args.lr": ("args", "lr"),
    }


def write_torchao(path: Path) -> None:
    path.mkdir()
    tensors, metadata = {}, {"format": "pt"}
    for name in ("model.a", "model.b"):
        written = torchao(
            np.random.default_rng(0), name, (8, 32), BF16, kind="Int8Tensor"
        )
        tensors |= written.tensors
        metadata |= written.metadata
    metadata["tensor_names"] = json.dumps(["model.a.weight", "model.b.weight"])
    save_file(tensors, path / "model.safetensors", metadata=metadata)


def test_descriptions_in_headers_follow_the_names_of_their_tensors(tmp_path):
    write_torchao(tmp_path / "model")
    edits = bridge.Edits(rename=(("^model", "body"),), drop=("model.b.*",))
    bridge.edit_safetensors(tmp_path / "model", tmp_path / "out", edits)
    was = bridge.open_checkpoint(tmp_path / "model").metadata()
    assert bridge.open_checkpoint(tmp_path / "out").metadata() == {
        "format": "pt",
        "body.a.weight": was["model.a.weight"],
        "tensor_names": '["body.a.weight"]',
    }


def test_tensors_of_one_weight_are_not_taken_apart(tmp_path):
    write_torchao(tmp_path / "model")
    for rename in (("model.a._weight_scale", "b._weight_scale"), ("_weight_qd", "_d")):
        edits = bridge.Edits(rename=(rename,))
        with pytest.raises(ValueError, match=facts("model.a.weight")):
            bridge.edit_safetensors(tmp_path / "model", tmp_path / "out", edits)
        assert not (tmp_path / "out").exists()


def test_checksums_stay_and_chat_templates_follow(tmp_path):
    write_llama(tmp_path / "model")
    (tmp_path / "model/additional_chat_templates").mkdir()
    (tmp_path / "model/additional_chat_templates/rag.jinja").write_text("rag")
    (tmp_path / "model/SHA256SUMS").write_text("0")
    (tmp_path / "model/README.md").write_text("read")
    bridge.edit_safetensors(tmp_path / "model", tmp_path / "out", bridge.Edits())
    out = tmp_path / "out"
    files = {str(f.relative_to(out)) for f in out.rglob("*") if f.is_file()}
    rag = "additional_chat_templates/rag.jinja"
    assert files >= {rag, "README.md", "config.json"}
    assert "SHA256SUMS" not in files


def test_a_link_out_of_an_edited_directory_is_not_followed(tmp_path):
    write_llama(tmp_path / "model")
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "model/README.md").symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match=facts("README.md", tmp_path / "secret")):
        bridge.edit_safetensors(tmp_path / "model", tmp_path / "out", bridge.Edits())
    assert not (tmp_path / "out").exists()


CASTS = {
    "all": ("*", {"torch_dtype": "bfloat16", "text_config": {"dtype": "bfloat16"}}),
    "one": ("model.norm.*", None),
}


@pytest.mark.parametrize("pattern, changed", CASTS.values(), ids=CASTS)
def test_the_dtype_of_a_config_is_that_of_all_tensors(tmp_path, pattern, changed):
    write_llama(tmp_path / "model")
    said = {"torch_dtype": "float32", "text_config": {"dtype": "float32"}, "x": "é"}
    (tmp_path / "model/config.json").write_text(json.dumps(said))
    edits = bridge.Edits(cast=((pattern, BF16),))
    bridge.edit_safetensors(tmp_path / "model", tmp_path / "out", edits)
    config = (tmp_path / "out/config.json").read_text()
    assert json.loads(config) == said | (changed or {})


def test_the_dtype_of_a_config_is_found_behind_a_mark_and_beside_infinity(tmp_path):
    write_llama(tmp_path / "model")
    said = {"dtype": "float32", "time_step_limit": [0.0, float("inf")]}
    config = tmp_path / "model/config.json"
    config.write_text(json.dumps(said), encoding="utf-8-sig")
    edits = bridge.Edits(cast=(("*", BF16),))
    bridge.edit_safetensors(tmp_path / "model", tmp_path / "out", edits)
    found = json.loads((tmp_path / "out/config.json").read_text())
    assert found == said | {"dtype": "bfloat16"}


def test_the_dtype_of_a_quantized_config_is_left(tmp_path):
    write_llama(tmp_path / "model")
    said = {"dtype": "float32", "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "model/config.json").write_text(json.dumps(said))
    edits = bridge.Edits(cast=(("*", BF16),))
    bridge.edit_safetensors(tmp_path / "model", tmp_path / "out", edits)
    assert json.loads((tmp_path / "out/config.json").read_text()) == said
