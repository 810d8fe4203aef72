"""Whatever lies in a checkpoint's place: one clear error; nothing run or written."""

import io
import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bridge_helpers import mould_of, random_tensors, write_llama
from helpers.errors import facts
from refusals import CANARY, LFS_POINTER, Canary, header

import bridge


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
    with pytest.raises(
        ValueError, match=facts("model.norm.weight", "int32", "float32")
    ):
        bridge.load_hf(checkpoint, mould)
