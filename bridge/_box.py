"""Boxes: regions of an array given by one range per dim."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


class Range(NamedTuple):
    """Half-open range of positions, `[start, stop)`.

    Hashable, so that a box can be a dict key: `slice` is not before Python 3.12.
    """

    start: int
    stop: int


Box = tuple[Range, ...]
"""Region of an array: one range per dim."""


def complete(index: Sequence[Any], shape: tuple[int, ...]) -> Box:
    """Converts an index to a box: fills in open ends and missing trailing slices.

    Args:
      index: Slices, as in numpy indexing or in a `jax.Shard`'s index.
      shape: Shape of the indexed array.

    Raises:
      ValueError: If a slice has a step, or there are more slices than dims.
    """
    if any(s.step not in (None, 1) for s in index) or len(index) > len(shape):
        raise ValueError(
            f"Cannot take {tuple(index)} of shape {shape}: give at most one slice a "
            "dim, without a step."
        )
    index = (*index, *[slice(None)] * (len(shape) - len(index)))
    ends = [s.indices(size)[:2] for s, size in zip(index, shape, strict=True)]
    return tuple(Range(start, max(start, stop)) for start, stop in ends)


def as_index(box: Box) -> tuple[slice, ...]:
    """Returns the slices that index an array at a box."""
    return tuple(slice(*r) for r in box)


def take(array: np.ndarray, box: Box) -> np.ndarray:
    """Returns the region of an array at a box, as a view."""
    # The `...` keeps a 0-d array an array: numpy would return a scalar copy.
    return array[(*as_index(box), ...)]


def whole(shape: tuple[int, ...]) -> Box:
    """Returns the box that covers an entire array of this shape."""
    return tuple(Range(0, size) for size in shape)


def shape_of(box: Box) -> tuple[int, ...]:
    """Returns the shape of the region that a box selects."""
    return tuple(r.stop - r.start for r in box)


def span(box: Box, shape: tuple[int, ...]) -> Range:
    """Returns the flat range, in elements of a C-ordered array, that covers a box."""
    if 0 in shape_of(box):
        return Range(0, 0)
    first = last = 0
    for r, size in zip(box, shape, strict=True):
        first, last = first * size + r.start, last * size + r.stop - 1
    return Range(first, last + 1)


def overlap(a: Box, b: Box) -> Box | None:
    """Returns the intersection of two boxes, or None if they are disjoint."""
    common = tuple(
        Range(max(r.start, s.start), min(r.stop, s.stop))
        for r, s in zip(a, b, strict=True)
    )
    return common if all(r.start < r.stop for r in common) else None


def cover(boxes: Sequence[Box]) -> Box:
    """Returns the smallest box that contains all of `boxes`."""
    return tuple(
        Range(min(r.start for r in ranges), max(r.stop for r in ranges))
        for ranges in zip(*boxes, strict=True)
    )


def relative(box: Box, origin: Box) -> Box:
    """Returns a box in coordinates relative to `origin`, a box that contains it."""
    return tuple(
        Range(r.start - o.start, r.stop - o.start)
        for r, o in zip(box, origin, strict=True)
    )


def absolute(box: Box, origin: Box) -> Box:
    """Returns a box in absolute coordinates: the inverse of `relative`."""
    return tuple(
        Range(r.start + o.start, r.stop + o.start)
        for r, o in zip(box, origin, strict=True)
    )
