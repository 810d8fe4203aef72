"""Boxes: regions of an array, given by a start and a stop in each dim."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

Box = tuple[tuple[int, int], ...]
"""`(start, stop)` of each dim; `()` for a scalar. Hashable, unlike slices."""


def box_of(index: Sequence[slice] | None, shape: Sequence[int]) -> Box:
    """Returns the box that an index such as a shard's selects in an array of `shape`.

    Args:
      index: Slice in each dim, without steps; None for a scalar.
      shape: Shape of the array, which the slices' open ends are taken from.
    """
    bounds = zip(index or (), shape, strict=True)
    return tuple(one.indices(size)[:2] for one, size in bounds)


def full_box(shape: Sequence[int]) -> Box:
    """Returns the box of an entire array."""
    return tuple((0, size) for size in shape)


def shape_of(box: Box) -> tuple[int, ...]:
    """Returns the shape of the region."""
    return tuple(stop - start for start, stop in box)


def num_elements(box: Iterable[tuple[int, int]]) -> int:
    """Returns the number of elements in the region; 0 if a stop precedes its start."""
    return math.prod(max(stop - start, 0) for start, stop in box)


def overlap(a: Box, b: Box) -> Box | None:
    """Returns the intersection of two boxes; None if it is empty."""
    common = tuple(
        (max(r[0], s[0]), min(r[1], s[1])) for r, s in zip(a, b, strict=True)
    )
    return common if all(start < stop for start, stop in common) else None


def cover(boxes: Iterable[Box]) -> Box:
    """Returns the smallest box that contains all of `boxes`."""
    ranges = zip(*boxes, strict=True)
    return tuple((min(r)[0], max(stop for _, stop in r)) for r in ranges)


def index_in(box: Box, origin: Box | None = None) -> tuple[slice, ...]:
    """Returns the index of a box in an array that begins at that of `origin`, or at 0.

    Args:
      box: Box to select.
      origin: Box that the indexed array holds; None for one that starts at 0.
    """
    starts = [0] * len(box) if origin is None else [start for start, _ in origin]
    pairs = zip(box, starts, strict=True)
    return tuple(slice(start - at, stop - at) for (start, stop), at in pairs)
