"""What lies in a checkpoint's directory is what it seems to be, or one clear error."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bridge_helpers import HF_CONFIG
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
    directory: "is a directory in place of a file",
    pipe: "is a pipe, socket or device in place of a file",
    device: "is a pipe, socket or device in place of a file",
    socket: "is a pipe, socket or device in place of a file",
    link_to_nowhere: "is a link that leads nowhere",
    link_to_itself: "is a link that leads nowhere",
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_what_is_no_file_is_not_opened(checkpoint, refused, kind, name):
    (checkpoint / "model.safetensors").unlink()
    kind(checkpoint / name)
    refused(checkpoint, KINDS[kind])


def test_a_link_out_of_the_directory_tells_nothing_of_what_it_leads_to(
    checkpoint, refused, tmp_path
):
    (tmp_path / "secret").write_text("password: 12345, and more than eight bytes of it")
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "model.safetensors").symlink_to(tmp_path / "secret")
    refused(checkpoint, r"^((?!12345).)*$")


def test_links_as_the_hub_s_cache_has_them_are_followed(checkpoint, tmp_path):
    (checkpoint / "model.safetensors").rename(tmp_path / "0123abcd")
    (checkpoint / "model.safetensors").symlink_to("../0123abcd")
    assert "model.norm.weight" in bridge.open_checkpoint(checkpoint).keys()


@pytest.mark.parametrize("kind", [pipe, device, socket], ids=lambda k: k.__name__)
def test_a_path_that_is_no_file_is_not_opened(tmp_path, refused, kind):
    kind(tmp_path / "weights.safetensors")
    refused(tmp_path / "weights.safetensors", "in place of a file")


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
    "absent": (b_in("c.safetensors"), "'c.safetensors' is absent"),
    "above": (b_in("../b.safetensors"), "'../b.safetensors' is no file name"),
    "absolute": (b_in("/etc/passwd"), "'/etc/passwd' is no file name"),
    "below": (b_in("sub/b.safetensors"), "'sub/b.safetensors' is no file name"),
    "with a slash behind": (b_in("b.safetensors/"), "is no file name"),
    "the directory": (b_in("."), "'.' is no file name"),
    "its parent": (b_in(".."), "'..' is no file name"),
    "empty": (b_in(""), "'' is no file name"),
    "with a zero byte": (b_in("b\0.safetensors"), "is no file name"),
    "a number": (b_in(3), "has no 'weight_map'"),
    "null": (b_in(None), "has no 'weight_map'"),
    "not the tensor's": (b_in("a.safetensors"), "tensor 'b' is not in 'a.safetensors'"),
    "of no tensor in it": (
        {"a": "a.safetensors", "c": "b.safetensors"},
        "'b.safetensors' holds 'b', which the index does not name",
    ),
    "exchanged": (
        {"a": "b.safetensors", "b": "a.safetensors"},
        "'a.safetensors' holds 'a', which the index places in 'b.safetensors'",
    ),
    "a config": (b_in("config.json"), "config.json' is no safetensors file"),
}


@pytest.mark.parametrize("weight_map, match", INDICES.values(), ids=INDICES)
def test_an_index_whose_file_is_wrong_is_refused(
    checkpoint, refused, weight_map, match
):
    shard(checkpoint, weight_map)
    refused(checkpoint, match)


INDEX_TEXTS = {
    "empty": (b"", "not valid JSON"),
    "a list": (b"[]", "a JSON list, not an object"),
    "without a map": (b'{"metadata":{}}', "has no 'weight_map'"),
    "with an empty map": (b'{"weight_map":{}}', "has no 'weight_map'"),
    "with a list for a map": (b'{"weight_map":["a"]}', "has no 'weight_map'"),
    "with a tensor twice": (b'{"weight_map":{"a":"a","a":"b"}}', "twice: .'a'"),
    "with NaN": (b'{"weight_map":{},"size":NaN}', "NaN is no JSON number"),
    "a git-lfs pointer": (LFS_POINTER, "run `git lfs pull`"),
    "no UTF-8": (b"\xff\xfe{}", "not valid JSON"),
}


@pytest.mark.parametrize("text, match", INDEX_TEXTS.values(), ids=INDEX_TEXTS)
def test_an_index_that_cannot_be_understood_is_refused(
    checkpoint, refused, text, match
):
    (checkpoint / "model.safetensors.index.json").write_bytes(text)
    refused(checkpoint, match)


def test_an_index_of_100_megabytes_is_not_read(checkpoint, refused):
    with (checkpoint / "model.safetensors.index.json").open("wb") as stream:
        stream.truncate(10**8 + 1)
    refused(checkpoint, "has 100,000,001 bytes; at most 100,000,000 are accepted")


def test_a_tensor_in_two_files_is_refused(checkpoint, refused):
    shard(checkpoint, b_in("b.safetensors"))
    both = {name: np.zeros(4, np.float32) for name in "ab"}
    reference.save_file(both, checkpoint / "b.safetensors")
    refused(checkpoint, "'b.safetensors' holds 'a', which the index places in 'a.safe")


def test_two_damaged_files_are_named_at_once(checkpoint, refused):
    shard(checkpoint, b_in("b.safetensors"))
    for name in "ab":
        os.truncate(checkpoint / f"{name}.safetensors", 20)
    refused(checkpoint, "a.safetensors' is no .*\n.*b.safetensors' is no ")


def test_one_file_beside_an_index_of_others_is_refused(checkpoint, refused):
    weights = (checkpoint / "model.safetensors").read_bytes()
    shard(checkpoint, b_in("b.safetensors"))
    (checkpoint / "model.safetensors").write_bytes(weights)
    refused(checkpoint, "holds two checkpoints: 'model.safetensors', and")


def test_an_index_may_name_the_one_file_there_is(checkpoint):
    keys = bridge.open_checkpoint(checkpoint).keys()
    index = {"weight_map": dict.fromkeys(keys, "model.safetensors")}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    assert bridge.open_checkpoint(checkpoint).keys() == keys


OTHERS = {
    "pytorch_model.bin": "PyTorch pickles: `bridge.from_torch` reads them",
    "consolidated.00.pth": "PyTorch pickles: `bridge.from_torch` reads them",
    "model.pt": "PyTorch pickles: `bridge.from_torch` reads them",
    "adapter_model.safetensors": "a PEFT adapter, no model",
    "consolidated.safetensors": "safetensors under a name of their own",
    "model.gguf": "GGUF, of llama.cpp",
    "__0_0.distcp": "Megatron's distributed checkpoint: `bridge.megatron.open_",
    "latest_checkpointed_iteration.txt": "checkpoints of Megatron",
    "flax_model.msgpack": "flax of transformers 4",
    "tf_model.h5": "HDF5, of Keras",
    "model.onnx": "ONNX",
}


@pytest.mark.parametrize("name, advice", OTHERS.items())
def test_weights_of_another_kind_are_named_with_advice(
    checkpoint, refused, name, advice
):
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / name).write_bytes(pickle.dumps(Canary()))
    refused(checkpoint, f"neither 'model.safetensors' nor .*\n  '{name}': {advice}")


def test_many_files_of_a_kind_are_one_line(checkpoint, refused):
    (checkpoint / "model.safetensors").unlink()
    for number in range(5):
        (checkpoint / f"pytorch_model-{number}.bin").touch()
    refused(checkpoint, r"-0.bin', '.*-1.bin', '.*-2.bin' and 2 more: PyTorch pickles")


def test_an_empty_directory_is_refused(tmp_path, refused):
    refused(tmp_path, "holds neither 'model.safetensors' nor")


def test_a_pickle_s_own_path_is_refused(tmp_path, refused):
    (tmp_path / "model.bin").write_bytes(pickle.dumps(Canary()))
    refused(tmp_path / "model.bin", r"does not end in \.safetensors.*\n.*from_torch")


CONFIG = json.dumps(HF_CONFIG).encode()
CONFIGS = {
    "empty": (b"", "not valid JSON"),
    "a list": (b"[]", "a JSON list"),
    "cut short": (CONFIG[:-1], "not valid JSON"),
    "NaN": (CONFIG.replace(b"10000.0", b"NaN"), "NaN is no JSON number"),
    "infinity": (CONFIG.replace(b"10000.0", b"Infinity"), "Infinity is no JSON"),
    "minus infinity": (CONFIG.replace(b"10000.0", b"-Infinity"), "-Infinity is no"),
    "a float too large": (
        CONFIG.replace(b"10000.0", b"1e400"),
        "larger than any float",
    ),
    "a field twice": (CONFIG[:-1] + b',"head_dim":32}', r"twice: \['head_dim'\]"),
    "no UTF-8": (CONFIG.replace(b"llama", b"ll\xffma"), "not valid JSON"),
    "nested deeply": (b'{"a":' * 10**5, "maximum recursion"),
    "a git-lfs pointer": (LFS_POINTER, "run `git lfs pull`"),
}


@pytest.mark.parametrize("text, match", CONFIGS.values(), ids=CONFIGS)
def test_a_config_that_cannot_be_understood_is_refused(
    checkpoint, refused, text, match
):
    (checkpoint / "config.json").write_bytes(text)
    refused(checkpoint, match)


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
    "an_unknown_field": [float("nan"), 1],
}


@pytest.mark.parametrize(
    "name, value",
    [(name, value) for name, values in VALUES.items() for value in values],
)
def test_a_value_that_no_model_has_is_refused(name, value):
    # `rms_norm_eps` is `norm_eps` to us, and `rope_scaling` several fields.
    named = "rope|factor" if "rope" in name else name.removeprefix("rms_")
    with pytest.raises(ValueError, match=named):
        bridge.from_hf_config(HF_CONFIG | {name: value})
