"""A model's directory with PyTorch's files is read as one with safetensors is."""

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bridge_helpers import (
    assert_same_leaves,
    like_of,
    random_tensors,
    tensors_of,
    write_llama,
)
from helpers.errors import facts
from refusals import LFS_POINTER, Canary

import bridge
from fsdp_jax.cli import main

pytestmark = pytest.mark.torch

INDEX = "pytorch_model.bin.index.json"


def as_torch(
    tensors: Mapping[str, np.ndarray], dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    return {key: torch.from_numpy(value).to(dtype) for key, value in tensors.items()}


def write_torch(
    path: Path, state: dict[str, torch.Tensor], files: int = 1, **fields: Any
) -> Path:
    """Writes a tiny Llama as transformers did before safetensors."""
    write_llama(path, **fields)
    (path / "model.safetensors").unlink()
    if files == 1:
        torch.save(state, path / "pytorch_model.bin")
        return path
    names = [f"pytorch_model-{n + 1:05}-of-{files:05}.bin" for n in range(files)]
    weight_map = {key: names[n % files] for n, key in enumerate(state)}
    for name in names:
        held = {key: state[key] for key, file in weight_map.items() if file == name}
        torch.save(held, path / name)
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


@pytest.fixture
def tensors() -> dict[str, np.ndarray]:
    return random_tensors(np.float32)


@pytest.mark.parametrize("files", [1, 2])
def test_the_same_numbers_as_from_safetensors(llama, tensors, tmp_path, files):
    path = write_torch(tmp_path / "model", as_torch(tensors), files)
    like = like_of(bridge.from_hf_config(path))
    assert_same_leaves(bridge.load_hf(path, like), bridge.load_hf(llama, like))
    plans = bridge.plan(path).as_dict(), bridge.plan(llama).as_dict()
    assert plans[0]["leaves"] == plans[1]["leaves"]


def test_one_file_of_a_directory_finds_its_config(llama_bf16, tensors, tmp_path):
    path = write_torch(tmp_path / "model", as_torch(tensors, torch.bfloat16))
    like = like_of(bridge.from_hf_config(path))
    loaded = bridge.load_hf(path / "pytorch_model.bin", like)
    assert_same_leaves(loaded, bridge.load_hf(llama_bf16, like))


def test_a_tied_head_that_is_stored_too_is_left_out(tensors, tmp_path):
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    path = write_torch(tmp_path / "model", as_torch(tensors), tie_word_embeddings=True)
    like = like_of(bridge.from_hf_config(path))
    table = bridge.load_hf(path, like)["embed_tokens"]["embedding"]
    np.testing.assert_array_equal(table[...], tensors["model.embed_tokens.weight"])


def test_safetensors_are_preferred(tmp_path):
    path = write_llama(tmp_path / "model")
    (path / "pytorch_model.bin").write_bytes(b"not even looked at")
    assert bridge.open_checkpoint(path).keys() == tuple(tensors_of(path))


def test_one_file_and_an_index_without_it_are_two_models(tensors, tmp_path):
    path = write_torch(tmp_path / "model", as_torch(tensors), 2)
    torch.save(as_torch(tensors), path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=facts("'pytorch_model.bin'", f"'{INDEX}'")):
        bridge.open_checkpoint(path)


def test_code_in_a_pickle_is_not_run(checkpoint, refused):
    (checkpoint / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Canary()}, checkpoint / "pytorch_model.bin")
    refused(checkpoint, "pytorch_model.bin", "mkdir")


@pytest.mark.parametrize(
    "content, says",
    [
        (pickle.dumps({}, protocol=2), "weights_only=True"),
        (LFS_POINTER, "git-lfs"),
        (b"<html>", "b'<htm'"),
    ],
)
def test_what_is_no_file_of_torch_is_named(checkpoint, refused, content, says):
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "pytorch_model.bin").write_bytes(content)
    refused(checkpoint, "pytorch_model.bin", says)


def test_commands_take_it_and_an_edit_writes_safetensors(tensors, tmp_path, capsys):
    path = write_torch(tmp_path / "model", as_torch(tensors), 2)
    assert main(["inspect", str(path)]) == 0
    assert "model.norm.weight" in capsys.readouterr().out
    words = ["--drop", "lm_head*"]
    assert main(["edit", str(path), str(tmp_path / "out"), *words]) == 0
    found = tensors_of(tmp_path / "out")
    assert found.keys() == tensors.keys() - {"lm_head.weight"}
    for key, values in found.items():
        np.testing.assert_array_equal(values, tensors[key])
    assert not list((tmp_path / "out").glob("pytorch_model*"))
    assert main(["import", str(path), str(tmp_path / "imported")]) == 0
    words = ["compare", str(tmp_path / "imported"), str(path), "--against", "bridge"]
    assert main(words) == 0
