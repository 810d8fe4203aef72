"""Boxes: the parts of an array that one range a dim can name."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


class Range(NamedTuple):
    """Positions from `start` up to, and without, `stop`.

    A slice that can be a key of a dict: Python 3.11's own cannot.
    """

    start: int
    stop: int


Box = tuple[Range, ...]
"""One range for each dim of an array."""


def complete(index: Sequence[Any], shape: tuple[int, ...]) -> Box:
    """Makes a box of an index with open ends or with fewer slices than dims.

    Args:
      index: Slices, as numpy or jax hand them out.
      shape: Shape of the array that they index.

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
    """Returns the slices that take a box out of an array."""
    return tuple(slice(*r) for r in box)


def take(array: np.ndarray, box: Box) -> np.ndarray:
    """Returns the box of an array: a view, of what has no dims as well."""
    return array[(*as_index(box), ...)]


def whole(shape: tuple[int, ...]) -> Box:
    """Returns the box that is all of an array."""
    return tuple(Range(0, size) for size in shape)


def shape_of(box: Box) -> tuple[int, ...]:
    """Returns the shape of what a box names."""
    return tuple(r.stop - r.start for r in box)


def span(box: Box, shape: tuple[int, ...]) -> Range:
    """Returns the one range that covers a box of a C-ordered array, flattened."""
    if 0 in shape_of(box):
        return Range(0, 0)
    first = last = 0
    for r, size in zip(box, shape, strict=True):
        first, last = first * size + r.start, last * size + r.stop - 1
    return Range(first, last + 1)


def overlap(a: Box, b: Box) -> Box | None:
    """Returns what two boxes have in common, or None."""
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
    """Returns a box in the coordinates of another that contains it."""
    return tuple(
        Range(r.start - o.start, r.stop - o.start)
        for r, o in zip(box, origin, strict=True)
    )


def absolute(box: Box, origin: Box) -> Box:
    """Undoes `relative`."""
    return tuple(
        Range(r.start + o.start, r.stop + o.start)
        for r, o in zip(box, origin, strict=True)
    )
