"""What lies in a checkpoint's directory is what it seems to be, or one clear error."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bridge_helpers import HF_CONFIG
from helpers.errors import facts
from refusals import LFS_POINTER, Canary
from safetensors import numpy as reference

import bridge


def directory(file: Path) -> None:
    file.mkdir()


def pipe(file: Path) -> None:
    os.mkfifo(file)


def device(file: Path) -> None:
    file.symlink_to("/dev/zero")


def socket(file: Path) -> None:
    os.mknod(file, 0o140600)


def link_to_nowhere(file: Path) -> None:
    file.symlink_to("nowhere")


def link_to_itself(file: Path) -> None:
    file.symlink_to(file.name)


KINDS = {
    directory: ["directory"],
    pipe: ["pipe"],
    device: ["device"],
    socket: ["socket"],
    link_to_nowhere: ["link"],
    link_to_itself: ["link"],
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_what_is_no_file_is_not_opened(checkpoint, refused, kind, name):
    (checkpoint / "model.safetensors").unlink()
    kind(checkpoint / name)
    refused(checkpoint, f"{name}'", *KINDS[kind])


def test_a_link_out_of_the_directory_tells_nothing_of_what_it_leads_to(
    checkpoint, refused, tmp_path
):
    (tmp_path / "secret").write_text("password: 12345, and more than eight bytes of it")
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "model.safetensors").symlink_to(tmp_path / "secret")
    assert "12345" not in refused(checkpoint, "model.safetensors'")


def test_links_as_the_hub_s_cache_has_them_are_followed(checkpoint, tmp_path):
    (checkpoint / "model.safetensors").rename(tmp_path / "0123abcd")
    (checkpoint / "model.safetensors").symlink_to("../0123abcd")
    assert "model.norm.weight" in bridge.open_checkpoint(checkpoint).keys()


@pytest.mark.parametrize("kind", [pipe, device, socket], ids=lambda k: k.__name__)
def test_a_path_that_is_no_file_is_not_opened(tmp_path, refused, kind):
    kind(tmp_path / "weights.safetensors")
    refused(tmp_path / "weights.safetensors", kind.__name__)


def shard(directory: Path, weight_map: Any) -> None:
    """Puts two files of one tensor each, and an index, in place of the weights."""
    (directory / "model.safetensors").unlink()
    for name in ("a", "b"):
        tensors = {name: np.zeros(4, np.float32)}
        reference.save_file(tensors, directory / f"{name}.safetensors")
    index = json.dumps({"weight_map": weight_map})
    (directory / "model.safetensors.index.json").write_text(index)


def b_in(file: Any) -> dict[str, Any]:
    return {"a": "a.safetensors", "b": file}


INDICES = {
    "absent": (b_in("c.safetensors"), ["'c.safetensors'"]),
    "above": (b_in("../b.safetensors"), ["'../b.safetensors'"]),
    "absolute": (b_in("/etc/passwd"), ["'/etc/passwd'"]),
    "below": (b_in("sub/b.safetensors"), ["'sub/b.safetensors'"]),
    "with a slash behind": (b_in("b.safetensors/"), ["'b.safetensors/'"]),
    "the directory": (b_in("."), ["'.'"]),
    "its parent": (b_in(".."), ["'..'"]),
    "empty": (b_in(""), ["''"]),
    "with a zero byte": (b_in("b\0.safetensors"), [r"'b\x00.safetensors'"]),
    "a number": (b_in(3), ["'weight_map'"]),
    "null": (b_in(None), ["'weight_map'"]),
    "not the tensor's": (b_in("a.safetensors"), ["'b'", "'a.safetensors'"]),
    "of no tensor in it": (
        {"a": "a.safetensors", "c": "b.safetensors"},
        ["'b.safetensors'", "'b'"],
    ),
    "exchanged": (
        {"a": "b.safetensors", "b": "a.safetensors"},
        ["'a.safetensors'", "'a'", "'b.safetensors'"],
    ),
    "a config": (b_in("config.json"), ["config.json'"]),
}


@pytest.mark.parametrize("weight_map, match", INDICES.values(), ids=INDICES)
def test_an_index_whose_file_is_wrong_is_refused(
    checkpoint, refused, weight_map, match
):
    shard(checkpoint, weight_map)
    refused(checkpoint, *match)


INDEX_TEXTS = {
    "empty": (b"", ["JSON", "char 0"]),
    "a list": (b"[]", ["JSON", "list"]),
    "without a map": (b'{"metadata":{}}', ["'weight_map'"]),
    "with an empty map": (b'{"weight_map":{}}', ["'weight_map'"]),
    "with a list for a map": (b'{"weight_map":["a"]}', ["'weight_map'"]),
    "with a tensor twice": (b'{"weight_map":{"a":"a","a":"b"}}', ["JSON", "['a']"]),
    "with NaN": (b'{"weight_map":{},"size":NaN}', ["JSON", "NaN"]),
    "a git-lfs pointer": (LFS_POINTER, ["`git lfs pull`"]),
    "no UTF-8": (b"\xff\xfe{}", ["JSON", "0xff"]),
}


@pytest.mark.parametrize("text, match", INDEX_TEXTS.values(), ids=INDEX_TEXTS)
def test_an_index_that_cannot_be_understood_is_refused(
    checkpoint, refused, text, match
):
    (checkpoint / "model.safetensors.index.json").write_bytes(text)
    refused(checkpoint, "model.safetensors.index.json'", *match)


def test_an_index_of_100_megabytes_is_not_read(checkpoint, refused):
    with (checkpoint / "model.safetensors.index.json").open("wb") as stream:
        stream.truncate(10**8 + 1)
    refused(checkpoint, "100,000,001", "100,000,000")


def test_a_tensor_in_two_files_is_refused(checkpoint, refused):
    shard(checkpoint, b_in("b.safetensors"))
    both = {name: np.zeros(4, np.float32) for name in "ab"}
    reference.save_file(both, checkpoint / "b.safetensors")
    refused(checkpoint, "'b.safetensors'", "'a'", "'a.safetensors'")


def test_two_damaged_files_are_named_at_once(checkpoint, refused):
    shard(checkpoint, b_in("b.safetensors"))
    for name in "ab":
        os.truncate(checkpoint / f"{name}.safetensors", 20)
    refused(checkpoint, "a.safetensors'", "b.safetensors'")


def test_one_file_beside_an_index_of_others_is_refused(checkpoint, refused):
    weights = (checkpoint / "model.safetensors").read_bytes()
    shard(checkpoint, b_in("b.safetensors"))
    (checkpoint / "model.safetensors").write_bytes(weights)
    refused(checkpoint, "'model.safetensors'", "'model.safetensors.index.json'")


def test_an_index_may_name_the_one_file_there_is(checkpoint):
    keys = bridge.open_checkpoint(checkpoint).keys()
    index = {"weight_map": dict.fromkeys(keys, "model.safetensors")}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    assert bridge.open_checkpoint(checkpoint).keys() == keys


OTHERS = {
    "consolidated.00.pth": "path",
    "model.pt": "path",
    "adapter_model.bin": "`bridge.load_lora`",
    "adapter_model.safetensors": "`bridge.load_lora`",
    "consolidated.safetensors": "safetensors",
    "model.gguf": "GGUF",
    "__0_0.distcp": "bridge.megatron.open_megatron",
    "latest_checkpointed_iteration.txt": "Megatron",
    "flax_model.msgpack": "flax",
    "tf_model.h5": "HDF5",
    "model.onnx": "ONNX",
}


@pytest.mark.parametrize("name, advice", OTHERS.items())
def test_weights_of_another_kind_are_named_with_advice(
    checkpoint, refused, name, advice
):
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / name).write_bytes(pickle.dumps(Canary()))
    refused(checkpoint, "'model.safetensors'", f"'{name}'", advice)


def test_many_files_of_a_kind_are_one_line(checkpoint, refused):
    (checkpoint / "model.safetensors").unlink()
    for number in range(5):
        (checkpoint / f"part-{number}.bin").touch()
    refused(checkpoint, "'part-0.bin'", "'part-2.bin'", "2", "PyTorch")


def test_a_byte_order_mark_before_a_config_is_no_part_of_it(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIG), encoding="utf-8-sig")
    assert bridge.from_hf_config(tmp_path) == bridge.from_hf_config(HF_CONFIG)


def test_an_empty_directory_is_refused(tmp_path, refused):
    refused(tmp_path, "'model.safetensors'", "'model.safetensors.index.json'")


def test_a_pickle_s_own_path_is_refused(tmp_path, refused):
    (tmp_path / "model.bin").write_bytes(pickle.dumps(Canary()))
    refused(tmp_path / "model.bin", "torch.save")


CONFIG = json.dumps(HF_CONFIG).encode()
CONFIGS = {
    "empty": (b"", ["JSON", "char 0"]),
    "a list": (b"[]", ["JSON", "list"]),
    "cut short": (CONFIG[:-1], ["JSON", f"char {len(CONFIG) - 1}"]),
    "NaN": (CONFIG.replace(b"10000.0", b"NaN"), ["JSON", "NaN"]),
    "infinity": (CONFIG.replace(b"10000.0", b"Infinity"), ["JSON", "Infinity"]),
    "minus infinity": (CONFIG.replace(b"10000.0", b"-Infinity"), ["JSON", "-Infinity"]),
    "a float too large": (
        CONFIG.replace(b"10000.0", b"1e400"),
        ["1e400", "float"],
    ),
    "a field twice": (CONFIG[:-1] + b',"head_dim":32}', ["JSON", "['head_dim']"]),
    "no UTF-8": (CONFIG.replace(b"llama", b"ll\xffma"), ["JSON", "0xff"]),
    "nested deeply": (b'{"a":' * 10**5, ["JSON", "recursion"]),
    "a git-lfs pointer": (LFS_POINTER, ["`git lfs pull`"]),
}


@pytest.mark.parametrize("text, match", CONFIGS.values(), ids=CONFIGS)
def test_a_config_that_cannot_be_understood_is_refused(
    checkpoint, refused, text, match
):
    (checkpoint / "config.json").write_bytes(text)
    refused(checkpoint, "config.json'", *match)


VALUES = {
    "vocab_size": ["131", 131.0, True, -1, 0, [131], {}],
    "head_dim": ["16", 16.0, True, -16, 0],
    "num_key_value_heads": ["2", 3, 0, -2],
    "rms_norm_eps": ["1e-5", float("nan"), float("inf"), -1.0, True, None, [1]],
    "rope_theta": ["1e4", float("nan"), float("inf"), -1.0, True, [1]],
    "rope_scaling": [
        "linear",
        [1],
        {"type": "linear", "factor": "2"},
        {"type": "linear", "factor": -2},
        {"type": "linear", "factor": float("nan")},
        {"type": "linear", "factor": True},
        {"type": ["linear"], "factor": 2},
    ],
    "tie_word_embeddings": ["false", 0.5],
    "mlp_bias": [1, "no"],
    "eos_token_id": ["2", [1, "x"]],
    "bos_token_id": [True, "1"],
    "hidden_act": [float("nan"), ["silu"]],
    "model_type": [None, ["llama"], "pickle"],
}


def named(name: str, value: Any) -> str:
    """What an error calls the field: `rope_scaling` is several, `norm_eps` ours."""
    if name == "rope_scaling" and isinstance(value, dict):
        return "factor" if value["type"] == "linear" else "rope_type"
    return name.removeprefix("rms_")


@pytest.mark.parametrize(
    "name, value",
    [(name, value) for name, values in VALUES.items() for value in values],
)
def test_a_value_that_no_model_has_is_refused(name, value):
    with pytest.raises(ValueError, match=facts(named(name, value))):
        bridge.from_hf_config(HF_CONFIG | {name: value})
