"""Laws of layouts: what they move comes back, and slices commute with them."""

import math

import numpy as np
import pytest
from helpers.errors import facts
from helpers.layouts import layouts
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge._box import Range, as_index, shape_of, whole
from bridge.rules._layout import Layout

QUERY = Layout.parse("(heads head_dim) embed -> embed heads head_dim")
SIZES = {"heads": 4, "head_dim": 6, "embed": 5}


def numbers(shape):
    return np.arange(math.prod(shape)).reshape(shape)


@settings(deadline=None)
@given(layouts(4))
def test_a_layout_then_its_inverse_changes_nothing(drawn):
    layout, sizes = drawn
    array = numbers(layout.source_shape(sizes))
    there = layout.apply(array, sizes)
    assert there.shape == layout.destination_shape(sizes)
    np.testing.assert_array_equal(layout.invert().apply(there, sizes), array)


@settings(deadline=None, max_examples=300)
@given(layouts(4), st.data())
def test_a_slice_of_the_source_is_enough_for_a_slice_of_the_destination(drawn, data):
    layout, sizes = drawn
    array = numbers(layout.source_shape(sizes))
    box = tuple(
        Range(*sorted(data.draw(st.lists(st.integers(0, n), min_size=2, max_size=2))))
        for n in layout.destination_shape(sizes)
    )
    piece = array[as_index(layout.source_box(box, sizes))]
    expected = layout.apply(array, sizes)[as_index(box)]
    np.testing.assert_array_equal(layout.apply_box(piece, box, sizes), expected)


def test_a_pattern_moves_what_its_words_say():
    array = numbers((24, 5))
    moved = QUERY.apply(array, SIZES)
    assert moved.shape == (5, 4, 6)
    assert moved[2, 3, 1] == array[3 * 6 + 1, 2]


@pytest.mark.parametrize(
    "box, elements",
    [
        ((Range(0, 5), Range(1, 3), Range(0, 6)), 60),  # leading factor: exact rows
        ((Range(1, 2), Range(0, 4), Range(0, 6)), 24),  # a whole source dim: exact
        ((Range(0, 5), Range(2, 3), Range(1, 4)), 15),  # inside one head: exact
        ((Range(0, 5), Range(0, 4), Range(0, 3)), 120),  # strided: read whole
    ],
)
def test_a_shard_reads_as_little_as_one_range_can(box, elements):
    assert math.prod(shape_of(QUERY.source_box(box, SIZES))) == elements


def test_the_whole_destination_is_the_whole_source():
    assert QUERY.source_box(whole((5, 4, 6)), SIZES) == whole((24, 5))


@pytest.mark.parametrize(
    "pattern, match",
    [
        ("a b", ["'a b'", "'->'"]),
        ("a -> b -> c", ["'a -> b -> c'", "'->'"]),
        ("a b -> a", ["'a b -> a'", "['b']"]),
        ("a a -> a", ["'a a -> a'", "['a']"]),
        ("(a b -> a b", ["'(a b -> a b'", "'(a b'"]),
        ("a, b -> b a", ["'a, b -> b a'", "'a, b'"]),
        ("((a) b) -> a b", ["'((a) b) -> a b'", "'((a) b)'"]),
    ],
)
def test_a_malformed_pattern_is_refused(pattern, match):
    with pytest.raises(ValueError, match=facts(*match)):
        Layout.parse(pattern)
