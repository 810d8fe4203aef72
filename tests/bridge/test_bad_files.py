"""Whatever lies in a checkpoint's place: one clear error; nothing run or written."""

import io
import json
import os
import pickle
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bridge_helpers import HF_CONFIG, mould_of, random_tensors, write_llama
from safetensors import numpy as reference

import bridge

# Some files claim headers of 100 MB, and tensors far larger than any machine.
MAX_ALLOCATED_BYTES = 10**7
CANARY = "code from the file was run"


class Canary:
    """An object whose pickle makes a directory when it is loaded."""

    def __reduce__(self):
        return os.mkdir, (CANARY,)


def header(text: bytes, data: bytes = b"") -> bytes:
    return len(text).to_bytes(8, "little") + text + data


def tensor(shape: Any, start: Any, end: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def one(*args: Any, **kwargs: Any) -> bytes:
    """A file of one tensor, and 16 bytes of data whatever it says."""
    return header(json.dumps({"w": tensor(*args, **kwargs)}).encode(), bytes(16))


def two(a: dict[str, Any], b: dict[str, Any], num_bytes: int) -> bytes:
    return header(json.dumps({"a": a, "b": b}).encode(), bytes(num_bytes))


def torch_zip() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Canary()))
    return stream.getvalue()


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
GOOD = b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'

NO_SAFETENSORS = {
    "no bytes": (b"", "has 0 bytes"),
    "seven bytes": (b"\0" * 7, "has 7 bytes"),
    "a length alone": (bytes(8), "begin with b''"),
    "cut in the header": (header(GOOD)[:40], "cut short: it has 40 bytes"),
    "a length of 2**64 - 1": (b"\xff" * 8 + GOOD, "18,446,744,073,709,551,615"),
    "a length of 100 MB": ((10**8).to_bytes(8, "little") + GOOD, "is no safetensors"),
    "zeros": (header(bytes(99)), r"begin with b'\\x00'"),
    "a list": (header(b"[]"), r"begin with b'\['"),
    "a git-lfs pointer": (LFS_POINTER, "run `git lfs pull`"),
    "a pickle that runs code": (pickle.dumps(Canary()), "a bare pickle, as torch"),
    "a torch zip that runs code": (torch_zip(), "a zip.*bridge.from_torch"),
    "a GGUF file": (b"GGUF\3\0\0\0" + bytes(32), "a GGUF file"),
    "an HDF5 file": (b"\x89HDF\r\n\x1a\n" + bytes(32), "an HDF5 file"),
    "a web page": (b"<!DOCTYPE html><title>Sign in</title>", "a web page"),
}
BAD_JSON = {
    "cut short": (GOOD[:-1], "not valid JSON"),
    "something after it": (GOOD + b"x", "Extra data"),
    "bytes that are no UTF-8": (b'{"\xff\xfe":1}', "not valid JSON: 'utf-8' codec"),
    "UTF-16": (GOOD.decode().encode("utf-16-le"), "not valid JSON"),
    "half a surrogate pair": (b'{"\\ud800":1}', "surrogates not allowed"),
    "nested 100,000 deep": (b'{"a":' * 10**5, "not valid JSON: maximum recursion"),
    "a number of 5,000 digits": (b'{"w":' + b"9" * 5000 + b"}", "4300 digits"),
    "NaN": (GOOD.replace(b"4]", b"NaN]"), "NaN is no JSON number"),
    "infinity": (GOOD.replace(b"4]", b"Infinity]"), "Infinity is no JSON number"),
    "an exponent too large": (GOOD.replace(b"4]", b"1e999]"), "1e999 is larger than"),
    "a tensor twice": (GOOD[:-1] + b"," + GOOD[1:], r"keys given twice: \['w'\]"),
    "a field twice": (GOOD.replace(b"[4],", b'[4],"dtype":"I8",'), "twice.*'dtype'"),
    "metadata that are no text": (b'{"__metadata__":{"a":1}}', "not text by name"),
    "metadata that are a list": (b'{"__metadata__":[]}', "not text by name"),
}
BAD_TENSORS = {
    "no object": (header(b'{"w":3}'), "'w': is not described by"),
    "no offsets": (header(b'{"w":{"dtype":"F32","shape":[4]}}'), "not described by"),
    "a further field": (
        header(GOOD.replace(b"]}", b'],"pickle":1}')),
        "is not described by dtype, shape and data_offsets alone",
    ),
    "an unknown dtype": (one([4], 0, 16, "F12"), "dtype 'F12' is none of"),
    "a dtype in small letters": (one([4], 0, 16, "f32"), "dtype 'f32' is none of"),
    "a dtype that is a list": (one([4], 0, 16, ["F32"]), "is none of"),
    "another dtype than the bytes": (one([4], 0, 16, "F64"), "needs 32 bytes"),
    "a shape of another size": (one([5], 0, 16), "needs 20 bytes.* hold 16"),
    "a shape that is a number": (one(4, 0, 16), "shape 4 is not a list of sizes"),
    "no shape": (one(None, 0, 16), "shape None is not a list of sizes"),
    "a negative size": (one([-4], 0, 16), r"shape \[-4\] is not a list of sizes"),
    "a size of true": (one([True, 4], 0, 16), "is not a list of sizes"),
    "a size with a point": (one([4.0], 0, 16), r"shape \[4.0\] is not"),
    "a size in quotes": (one(["4"], 0, 16), r"shape \['4'\] is not"),
    "a size of 2**64": (one([2**64], 0, 16), "is not a list of sizes"),
    "a product of 2**80": (one([2**40, 2**40], 0, 16), "larger than any file"),
    "a product made 0 at last": (one([2**62, 2**62, 0], 0, 0), "larger than any file"),
    "a product that wraps to 16": (one([2**62 + 1, 4], 0, 16), "larger than any"),
    "65 dims": (one([1] * 65, 0, 4), "65 dims are more than 64"),
    "100,000 dims": (one([1] * 10**5, 0, 4), "100,000 dims are more"),
    "a negative offset": (one([4], -8, 8), "are not two byte positions"),
    "an offset of 2**64": (one([4], 2**64, 2**64 + 16), "not two byte positions"),
    "offsets past the end": (one([4], 10**18, 10**18 + 16), "lie past the end"),
    "offsets backwards": (one([4], 16, 0), "hold -16"),
    "offsets in quotes": (one([4], "0", "16"), "are not two byte positions"),
    "one offset": (header(GOOD.replace(b"0,16", b"16")), "are not two byte positions"),
    "data cut short": (header(GOOD, bytes(15)), r"past the end of the data \(15 bytes"),
    "data left over": (header(GOOD, bytes(20)), "4 bytes at the end belong to no"),
    "a gap before": (one([2], 8, 16), "starts at 8, not 0: follows a gap"),
    "a gap between": (two(tensor([1], 0, 4), tensor([1], 8, 12), 12), "follows a gap"),
    "an overlap": (two(tensor([4], 0, 16), tensor([4], 8, 24), 24), "'b'.* overlaps"),
    "the same bytes twice": (
        two(tensor([4], 0, 16), tensor([4], 0, 16), 16),
        "'b': starts at 0, not 16: overlaps the tensor before it",
    ),
}
FILES = NO_SAFETENSORS | BAD_TENSORS
FILES |= {f"JSON: {k}": (header(text), match) for k, (text, match) in BAD_JSON.items()}


@pytest.fixture
def checkpoint(tmp_path, monkeypatch) -> Path:
    """A directory that loads, to be broken, and somewhere for stray files to show."""
    monkeypatch.chdir(tmp_path)
    return write_llama(tmp_path / "checkpoint")


@pytest.fixture
def refused(tmp_path, capfd) -> Callable[[Path, str], None]:
    """Asserts that a path is refused, and that nothing else happens."""

    def refused(path: Path, match: str) -> None:
        before = listing(tmp_path)
        capfd.readouterr()
        tracemalloc.start()
        with pytest.raises(ValueError, match=match) as raised:
            bridge.load_hf(path, {})
        allocated = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert str(path) in str(raised.value)
        assert len(str(raised.value)) < 2000
        assert listing(tmp_path) == before and CANARY not in before
        assert capfd.readouterr() == ("", "")
        assert allocated < MAX_ALLOCATED_BYTES

    return refused


def listing(directory: Path) -> dict[str, tuple[int, int]]:
    """Size and time of change of everything below a directory."""
    return {
        str(path.relative_to(directory)): (stat.st_size, stat.st_mtime_ns)
        for path in sorted(directory.rglob("*"))
        for stat in [path.lstat()]
    }


@pytest.mark.parametrize("content, match", FILES.values(), ids=FILES)
def test_a_file_that_is_no_checkpoint_is_refused(checkpoint, refused, content, match):
    (checkpoint / "model.safetensors").write_bytes(content)
    refused(checkpoint, match)


def test_the_table_s_files_are_bad_by_what_their_name_says(checkpoint):
    (checkpoint / "model.safetensors").write_bytes(header(GOOD, bytes(16)))
    assert bridge.open_checkpoint(checkpoint).keys() == ("w",)


def test_the_canaries_run_code_where_pickles_are_loaded(checkpoint):
    pickle.loads(pickle.dumps(Canary()))
    assert Path(CANARY).is_dir()


def test_a_file_of_a_claimed_90_megabytes_of_header_is_not_read(checkpoint, refused):
    with (checkpoint / "model.safetensors").open("wb") as stream:
        stream.write((9 * 10**7).to_bytes(8, "little"))
        stream.truncate(10**8)
    refused(checkpoint, r"begin with b'\\x00'")


def test_all_broken_tensors_are_named_at_once(checkpoint, refused):
    content = two(tensor([5], 0, 16), tensor([4], 16, 32, "F12"), 32)
    (checkpoint / "model.safetensors").write_bytes(content)
    refused(checkpoint, "'a'.*\n.*'b'")


def test_integers_in_place_of_weights_are_refused(checkpoint, refused):
    tensors = {k: v.astype(np.int32) for k, v in random_tensors(np.float32).items()}
    write_llama(checkpoint, tensors=tensors)
    mould = mould_of(bridge.from_hf_config(checkpoint))
    with pytest.raises(ValueError, match="not cast.*\n.*int32, the tree wants float32"):
        bridge.load_hf(checkpoint, mould)


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
