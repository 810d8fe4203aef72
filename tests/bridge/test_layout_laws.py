"""Laws of boxes and rules: what numpy would slice, and every element exactly once."""

import string

import numpy as np
import pytest
from helpers.errors import facts
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge import Rule
from bridge._box import (
    Range,
    absolute,
    as_index,
    complete,
    cover,
    overlap,
    relative,
    shape_of,
    whole,
)

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
DIMS = string.ascii_lowercase[:4]
SIZES = {"a": 2, "b": 3, "c": 1, "d": 4, "layer": 3, "expert": 2}


def boxes_in(shape):
    ends = [st.lists(st.integers(0, n), min_size=2, max_size=2) for n in shape]
    return st.tuples(*(e.map(lambda pair: Range(*sorted(pair))) for e in ends))


def mask(box, shape):
    """The elements that a box names, as numpy understands it."""
    array = np.zeros(shape, bool)
    array[as_index(box)] = True
    return array


@st.composite
def two_boxes(draw):
    shape = draw(shapes)
    return shape, draw(boxes_in(shape)), draw(boxes_in(shape))


@settings(deadline=None)
@given(shapes, st.data())
def test_any_slices_are_completed_to_the_box_that_numpy_takes(shape, data):
    end = st.none() | st.integers(-7, 7)
    index = data.draw(
        st.lists(st.builds(slice, end, end, st.sampled_from([None, 1])), max_size=3)
    )[: len(shape)]
    box = complete(index, shape)
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    np.testing.assert_array_equal(array[as_index(box)], array[tuple(index)])
    assert shape_of(box) == array[tuple(index)].shape


@settings(deadline=None)
@given(two_boxes())
def test_the_overlap_of_boxes_is_what_is_in_both(drawn):
    shape, a, b = drawn
    common = overlap(a, b)
    both = mask(a, shape) & mask(b, shape)
    expected = mask(common, shape) if common is not None else np.zeros(shape, bool)
    np.testing.assert_array_equal(expected, both)
    assert (common is None) == (not both.any())


@settings(deadline=None)
@given(two_boxes())
def test_a_cover_is_the_smallest_box_around_others(drawn):
    shape, a, b = drawn
    around = cover([a, b])
    for dim, r in enumerate(around):
        assert {r.start, r.stop} <= {*a[dim], *b[dim]}
        for box in (a, b):
            assert r.start <= box[dim].start and box[dim].stop <= r.stop
    assert cover([a]) == a


@settings(deadline=None)
@given(two_boxes())
def test_a_box_within_a_box_is_the_same_elements(drawn):
    shape, a, b = drawn
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    origin = cover([a, b])
    inside = relative(a, origin)
    part = array[as_index(origin)][as_index(inside)]
    np.testing.assert_array_equal(part, array[as_index(a)])
    assert absolute(inside, origin) == a
    assert relative(a, whole(shape)) == a


@st.composite
def rules(draw):
    """A rule of any layout, one to one, splitting or concatenating, stacked or not."""
    source = draw(st.permutations(DIMS))[: draw(st.integers(1, 4))]
    destination = draw(st.permutations(source))
    pattern = f"{' '.join(source)} -> {' '.join(destination)}"
    captures = draw(st.sampled_from(["", "{layer}.", "{layer}.{expert}."]))
    many = tuple("xyz"[: draw(st.integers(1, 3))])
    dim = draw(st.integers(0, len(source) - 1))
    if draw(st.booleans()):
        return Rule(captures + "w", many, pattern, dim)
    return Rule(tuple(captures + name for name in many), "leaf", pattern, dim)


def assert_tiled(rule, side):
    """Every element of every array of one side is in exactly one piece."""
    counts: dict[str, np.ndarray] = {}
    for piece in rule.pieces(SIZES):
        shape = getattr(piece, f"{side}_shape")
        count = counts.setdefault(getattr(piece, side), np.zeros(shape, int))
        assert count.shape == shape
        count[as_index(getattr(piece, f"{side}_box"))] += 1
    for count in counts.values():
        np.testing.assert_array_equal(count, 1)


@settings(deadline=None)
@given(rules())
def test_the_pieces_of_a_rule_are_every_element_of_both_sides_once(rule):
    assert_tiled(rule, "source")
    assert_tiled(rule, "destination")


@pytest.mark.parametrize(
    "source, destination, layout, dim",
    [
        ("w", ("x", "y"), ("a b -> b a", "a d -> d a"), 0),
        (("x", "y"), "w", ("a b -> a b", "d b -> d b"), 1),
        ("w", ("x", "y"), ("a b -> a b", "a b c -> a b c"), 0),
    ],
)
def test_parts_that_leave_a_gap_are_refused(source, destination, layout, dim):
    rule = Rule(source, destination, layout, dim)
    with pytest.raises(ValueError, match=facts(str(rule), dim)):
        list(rule.pieces(SIZES))


def test_a_dim_counted_from_the_end_is_refused():
    with pytest.raises(ValueError, match=facts("dim=-1")):
        Rule("w", ("x", "y"), "a b -> a b", -1)
