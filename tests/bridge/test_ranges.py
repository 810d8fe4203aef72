"""Ranges of files go to and from memory to the byte, however the system cuts them."""

import io
import math

import numpy as np
import pytest
from helpers.errors import facts
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import numpy as reference

import bridge
from bridge._box import Range, as_index, shape_of, span, whole
from bridge._reorder import Scratch, copy
from bridge.formats._ranges import append, read_range
from bridge.formats._source import DirectSource, read_into

SHAPE = (6, 4, 5)
VALUES = np.arange(120, dtype=np.float32).reshape(SHAPE)
boxes = st.tuples(
    *(st.tuples(st.integers(0, n), st.integers(0, n)).map(sorted) for n in SHAPE)
).map(lambda ends: tuple(Range(*pair) for pair in ends))


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> DirectSource:
    file = tmp_path_factory.mktemp("source") / "model.safetensors"
    reference.save_file({"pad": np.ones(3, np.float32), "w": VALUES}, file)
    source = bridge.open_checkpoint(file)
    assert isinstance(source, DirectSource)
    return source


@settings(deadline=None)
@given(boxes, st.booleans())
def test_any_box_is_read_into_the_memory_that_is_given(source, box, ahead):
    out = np.full(shape_of(box), -1, np.float32)
    read_into(source, "w", box, out, ahead=ahead)
    np.testing.assert_array_equal(out, VALUES[as_index(box)])


@given(boxes)
def test_a_span_is_the_smallest_range_that_holds_a_box(box):
    inside = np.arange(120).reshape(SHAPE)[as_index(box)].reshape(-1)
    found = span(box, SHAPE)
    assert found == ((inside[0], inside[-1] + 1) if len(inside) else (0, 0))


def test_a_file_that_ends_early_is_an_error(tmp_path):
    (tmp_path / "short").write_bytes(bytes(10))
    with pytest.raises(ValueError, match=facts("short'", "6")):
        read_range(tmp_path / "short", 4, [memoryview(bytearray(12))])


class Reluctant(io.FileIO):
    """A file that takes seven bytes at a time."""

    def write(self, data):
        return super().write(data[:7])


def test_short_writes_are_continued(tmp_path):
    content = bytes(range(200))
    with Reluctant(tmp_path / "file", "wb") as file:
        append(file, memoryview(content[:90]))
        append(file, memoryview(content[90:]))
    assert (tmp_path / "file").read_bytes() == content


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4), (0, 3), (3, 0)])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.complex64])
def test_scratch_has_any_shape_spread_along_any_dim(shape, dtype):
    scratch, dtype = Scratch(), np.dtype(dtype)
    values = np.arange(math.prod(shape)).reshape(shape).astype(dtype)
    for spread in (None, *range(len(shape))):
        taken, runs = scratch.take(shape, dtype, spread=spread)
        copy(taken, values)
        np.testing.assert_array_equal(taken, values)
        assert b"".join(runs) == values.tobytes()
        if spread is not None and values.size:
            assert taken.strides[spread] // 64 % 2 == 1


def test_whole_boxes_need_no_memory_but_the_one_given(source, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("memory was taken")

    out = np.empty(SHAPE, np.float32)
    monkeypatch.setattr(np, "empty", refuse)
    read_into(source, "w", whole(SHAPE), out, ahead=True)
    np.testing.assert_array_equal(out, VALUES)
