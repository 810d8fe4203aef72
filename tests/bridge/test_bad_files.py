"""Whatever lies in a checkpoint's place: one clear error; nothing run or written."""

import io
import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bridge_helpers import like_of, random_tensors, write_llama
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
    "no bytes": (b"", ["0 bytes"]),
    "seven bytes": (b"\0" * 7, ["7 bytes"]),
    "a length alone": (bytes(8), ["b''"]),
    "cut in the header": (header(GOOD)[:40], ["40 bytes"]),
    "a length of 2**64 - 1": (b"\xff" * 8 + GOOD, ["18,446,744,073,709,551,615"]),
    "a length of 100 MB": (
        (10**8).to_bytes(8, "little") + GOOD,
        ["63 bytes", "b'{'"],
    ),
    "zeros": (header(bytes(99)), [r"b'\x00'"]),
    "a list": (header(b"[]"), ["b'['"]),
    "a git-lfs pointer": (LFS_POINTER, ["`git lfs pull`"]),
    "a pickle that runs code": (pickle.dumps(Canary()), ["pickle", "1.6"]),
    "a torch zip that runs code": (torch_zip(), ["zip", ".pt"]),
    "a GGUF file": (b"GGUF\3\0\0\0" + bytes(32), ["GGUF"]),
    "an HDF5 file": (b"\x89HDF\r\n\x1a\n" + bytes(32), ["HDF5"]),
    "a web page": (b"<!DOCTYPE html><title>Sign in</title>", ["web"]),
}
BAD_JSON = {
    "cut short": (GOOD[:-1], ["JSON", f"char {len(GOOD) - 1}"]),
    "something after it": (GOOD + b"x", ["JSON", f"char {len(GOOD)}"]),
    "bytes that are no UTF-8": (b'{"\xff\xfe":1}', ["JSON", "'utf-8'", "0xff"]),
    "UTF-16": (GOOD.decode().encode("utf-16-le"), ["JSON", "char 1"]),
    "half a surrogate pair": (b'{"\\ud800":1}', ["surrogates"]),
    "nested 100,000 deep": (b'{"a":' * 10**5, ["JSON", "recursion"]),
    "a number of 5,000 digits": (
        b'{"w":' + b"9" * 5000 + b"}",
        ["JSON", "4300 digits"],
    ),
    "NaN": (GOOD.replace(b"4]", b"NaN]"), ["JSON", "NaN"]),
    "infinity": (GOOD.replace(b"4]", b"Infinity]"), ["JSON", "Infinity"]),
    "an exponent too large": (GOOD.replace(b"4]", b"1e999]"), ["1e999", "float"]),
    "a tensor twice": (GOOD[:-1] + b"," + GOOD[1:], ["JSON", "['w']"]),
    "a field twice": (
        GOOD.replace(b"[4],", b'[4],"dtype":"I8",'),
        ["JSON", "['dtype']"],
    ),
    "metadata that are no text": (
        b'{"__metadata__":{"a":1}}',
        ["'__metadata__'", "{'a': 1}"],
    ),
    "metadata that are a list": (b'{"__metadata__":[]}', ["'__metadata__'", "[]"]),
}
BAD_TENSORS = {
    "no object": (header(b'{"w":3}'), ["'w'", "data_offsets"]),
    "no offsets": (
        header(b'{"w":{"dtype":"F32","shape":[4]}}'),
        ["'w'", "data_offsets"],
    ),
    "a further field": (
        header(GOOD.replace(b"]}", b'],"pickle":1}')),
        ["'w'", "data_offsets"],
    ),
    "an unknown dtype": (one([4], 0, 16, "F12"), ["'w'", "dtype 'F12'"]),
    "a dtype in small letters": (one([4], 0, 16, "f32"), ["'w'", "dtype 'f32'"]),
    "a dtype that is a list": (one([4], 0, 16, ["F32"]), ["'w'", "dtype ['F32']"]),
    "another dtype than the bytes": (one([4], 0, 16, "F64"), ["32 bytes"]),
    "a shape of another size": (one([5], 0, 16), ["20 bytes", "16"]),
    "a shape that is a number": (one(4, 0, 16), ["shape 4"]),
    "no shape": (one(None, 0, 16), ["shape None"]),
    "a negative size": (one([-4], 0, 16), ["shape [-4]"]),
    "a size of true": (one([True, 4], 0, 16), ["shape [True, 4]"]),
    "a size with a point": (one([4.0], 0, 16), ["shape [4.0]"]),
    "a size in quotes": (one(["4"], 0, 16), ["shape ['4']"]),
    "a size of 2**64": (one([2**64], 0, 16), [f"shape [{2**64}]"]),
    "a product of 2**80": (one([2**40, 2**40], 0, 16), [f"shape {[2**40, 2**40]}"]),
    "a product made 0 at last": (
        one([2**62, 2**62, 0], 0, 0),
        [f"shape {[2**62, 2**62, 0]}"],
    ),
    "a product that wraps to 16": (
        one([2**62 + 1, 4], 0, 16),
        [f"shape {[2**62 + 1, 4]}"],
    ),
    "65 dims": (one([1] * 65, 0, 4), ["65 dims", "64"]),
    "100,000 dims": (one([1] * 10**5, 0, 4), ["100,000 dims", "64"]),
    "a negative offset": (one([4], -8, 8), ["data_offsets [-8, 8]"]),
    "an offset of 2**64": (
        one([4], 2**64, 2**64 + 16),
        [f"data_offsets {[2**64, 2**64 + 16]}"],
    ),
    "offsets past the end": (
        one([4], 10**18, 10**18 + 16),
        [f"{10**18:,}", "16"],
    ),
    "offsets backwards": (one([4], 16, 0), ["-16"]),
    "offsets in quotes": (one([4], "0", "16"), ["data_offsets ['0', '16']"]),
    "one offset": (header(GOOD.replace(b"0,16", b"16")), ["data_offsets [16]"]),
    "data cut short": (header(GOOD, bytes(15)), ["15 bytes"]),
    "data left over": (header(GOOD, bytes(20)), ["4 bytes"]),
    "a gap before": (one([2], 8, 16), ["'w'", "8", "0", "gap"]),
    "a gap between": (
        two(tensor([1], 0, 4), tensor([1], 8, 12), 12),
        ["'b'", "8", "4", "gap"],
    ),
    "an overlap": (
        two(tensor([4], 0, 16), tensor([4], 8, 24), 24),
        ["'b'", "8", "16", "overlaps"],
    ),
    "the same bytes twice": (
        two(tensor([4], 0, 16), tensor([4], 0, 16), 16),
        ["'b'", "0", "16", "overlaps"],
    ),
}
FILES = NO_SAFETENSORS | BAD_TENSORS
FILES |= {f"JSON: {k}": (header(text), match) for k, (text, match) in BAD_JSON.items()}


@pytest.mark.parametrize("content, match", FILES.values(), ids=FILES)
def test_a_file_that_is_no_checkpoint_is_refused(checkpoint, refused, content, match):
    (checkpoint / "model.safetensors").write_bytes(content)
    refused(checkpoint, *match)


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
    refused(checkpoint, r"b'\x00'")


def test_all_broken_tensors_are_named_at_once(checkpoint, refused):
    content = two(tensor([5], 0, 16), tensor([4], 16, 32, "F12"), 32)
    (checkpoint / "model.safetensors").write_bytes(content)
    refused(checkpoint, "'a'", "'b'")


def test_integers_in_place_of_weights_are_refused(checkpoint, refused):
    tensors = {k: v.astype(np.int32) for k, v in random_tensors(np.float32).items()}
    write_llama(checkpoint, tensors=tensors)
    like = like_of(bridge.from_hf_config(checkpoint))
    with pytest.raises(
        ValueError, match=facts("model.norm.weight", "int32", "float32")
    ):
        bridge.load_hf(checkpoint, like)


@pytest.mark.parametrize("held", [{}, {"stranger": np.ones(3, np.float32)}])
def test_what_a_file_lacks_has_the_names_of_its_own_family(checkpoint, held):
    write_llama(checkpoint, tensors=held)
    like = like_of(bridge.from_hf_config(checkpoint))
    with pytest.raises(ValueError, match=facts("model.embed_tokens.weight")):
        bridge.load_hf(checkpoint, like)
