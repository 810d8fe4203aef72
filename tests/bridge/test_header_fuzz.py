"""Any bytes at all are a checkpoint that reads as the package reads it, or an error."""

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from helpers.errors import facts
from hypothesis import event, given, settings
from hypothesis import strategies as st
from safetensors import deserialize

import bridge
from bridge.formats._safetensors import DTYPE_NAMES, DTYPES, encode_header

MAX_ALLOCATED_BYTES = 2 * 10**6  # a thousand times the longest file drawn here

sizes = st.integers(0, 4) | st.sampled_from([-1, 2**31, 2**62, 2**63, 2**64, 10**40])
offsets = st.integers(0, 40) | sizes
anything = st.recursive(
    st.none() | st.booleans() | sizes | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner)
    ),
    max_leaves=6,
)
entries = anything | st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPES, "F4", "f32"]) | anything,
        "shape": st.lists(sizes, max_size=3) | anything,
        "data_offsets": st.tuples(offsets, offsets) | anything,
    },
    optional={"extra": anything},
)
headers = st.dictionaries(st.text(max_size=3) | st.just("__metadata__"), entries)


@st.composite
def valid_files(draw) -> bytes:
    """Up to four tensors of any dtype, written one after another."""
    shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
    tensor = st.tuples(shapes, st.sampled_from([*DTYPES.values()]))
    tensors = draw(st.dictionaries(st.text(max_size=4), tensor, max_size=4))
    tensors.pop("__metadata__", None)
    count = sum(np.empty(*tensor).nbytes for tensor in tensors.values())
    return encode_header(tensors) + draw(st.binary(min_size=count, max_size=count))


@st.composite
def mutated_files(draw) -> bytes:
    """A valid file with up to four runs of bytes replaced, added or removed."""
    content = draw(valid_files())
    tokens = st.sampled_from([b"0", b"1", b"8", b"-", b"[", b'"', b",", b" ", b"NaN"])
    for _ in range(draw(st.integers(1, 4))):
        # The header is where the parser is: most of the changes belong there.
        start = draw(st.integers(0, min(len(content), draw(st.integers(8, 999)))))
        new = draw(tokens | st.binary(max_size=3))
        # As many bytes out as in, mostly: else the length of the header is wrong.
        removed = draw(st.just(len(new)) | st.integers(0, 3))
        content = content[:start] + new + content[start + removed :]
    return content


@st.composite
def written_files(draw) -> bytes:
    """A header of the right form, with anything at all for values."""
    text = json.dumps(draw(headers)).encode()
    return len(text).to_bytes(8, "little") + text + draw(st.binary(max_size=40))


@st.composite
def placed_files(draw) -> bytes:
    """Tensors of a few bytes anywhere: beside, over and apart from each other."""
    spans = st.tuples(st.integers(0, 4), st.integers(0, 3))
    header = {
        name: {"dtype": "U8", "shape": [size], "data_offsets": [start, start + size]}
        for name, (start, size) in draw(
            st.dictionaries(st.sampled_from("abcd"), spans)
        ).items()
    }
    text = json.dumps(header).encode()
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    data = bytes(range(draw(st.just(end) | st.integers(0, 8))))
    return len(text).to_bytes(8, "little") + text + data


any_files = st.binary() | mutated_files() | written_files() | placed_files()


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "model.safetensors"


def read_all(file: Path, content: bytes) -> dict[str, np.ndarray] | None:
    """Reads every tensor, or returns None if the file is refused."""
    file.write_bytes(content)
    try:
        source = bridge.open_checkpoint(file)
    except ValueError as error:
        assert str(file) in str(error)
        return None
    arrays = {key: source.read(key) for key in source.keys()}
    for key, array in arrays.items():
        assert (array.shape, array.dtype) == (source.shape(key), source.dtype(key))
    return arrays


def assert_read_as_the_package_does(content: bytes, arrays: dict[str, np.ndarray]):
    expected = dict(deserialize(content))
    assert set(arrays) == set(expected)
    for key, array in arrays.items():
        assert list(array.shape) == expected[key]["shape"]
        assert DTYPE_NAMES[array.dtype] == expected[key]["dtype"]
        assert array.tobytes() == bytes(expected[key]["data"])


@settings(deadline=None, max_examples=500)
@given(any_files)
def test_any_bytes_are_read_as_the_package_reads_them_or_refused(file, content):
    arrays = read_all(file, content)
    event("refused" if arrays is None else f"{len(arrays)} tensors")
    if arrays is not None:
        assert_read_as_the_package_does(content, arrays)


@settings(deadline=None, max_examples=100)
@given(valid_files())
def test_a_valid_file_is_never_refused(file, content):
    arrays = read_all(file, content)
    assert arrays is not None
    assert_read_as_the_package_does(content, arrays)


@settings(deadline=None, max_examples=100)
@given(any_files)
def test_no_header_makes_the_parser_take_memory(file, content):
    tracemalloc.start()
    read_all(file, content)
    allocated = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert allocated < MAX_ALLOCATED_BYTES


@settings(deadline=None, max_examples=200)
@given(st.binary() | mutated_files())
def test_any_bytes_for_an_index_are_an_error(file, content):
    index = file.with_name("model.safetensors.index.json")
    file.unlink(missing_ok=True)
    index.write_bytes(content)
    try:
        with pytest.raises(ValueError, match=facts(index.name)):
            bridge.open_checkpoint(file.parent)
    finally:
        index.unlink()
