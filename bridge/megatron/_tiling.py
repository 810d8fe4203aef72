"""Tilings: partitions of a box into smaller boxes, validated and indexed for search.

A sharded tensor is described by the boxes of its chunks. The description does not
guarantee that the chunks fill the tensor, and an expert layer has tens of thousands of
chunks, too many to scan for each of its tensors. Recursively cutting the box along
planes that no chunk crosses solves both: the recursion ends in single chunks, or finds
a gap or an overlap.
"""

import bisect
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from bridge._box import Box, Range, overlap, shape_of

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Tile(Generic[T]):
    """Leaf of a tiling: one part and the box that it fills."""

    box: Box
    part: T


@dataclasses.dataclass(frozen=True)
class Cut(Generic[T]):
    """Inner node of a tiling: a box cut into sections along one dim.

    Args:
      dim: Dim along which the box is cut.
      stops: End of each section along `dim`, ascending.
      sections: Tilings of the sections, in the order of `stops`.
    """

    dim: int
    stops: tuple[int, ...]
    sections: tuple["Tiling[T]", ...]


Tiling = Tile[T] | Cut[T]


def tile(box: Box, tiles: Sequence[Tile[T]]) -> Tiling[T]:
    """Builds a tiling: a search tree over the parts that fill a box.

    Args:
      box: Box that the parts must fill exactly once.
      tiles: Parts with their boxes, in any order.

    Returns:
      Tiling to pass to `find`.

    Raises:
      ValueError: If an element of `box` is in no part or in several, or a part extends
        beyond `box`. Arrangements that no plane divides (pinwheels) are rejected as
        well; no sharding produces them. Nor does it cut a box hundreds of times, one
        part of it after the other, along other dims each time.
    """
    try:
        return _tile(box, tiles)
    except RecursionError:
        raise ValueError(
            f"{len(tiles):,} parts of the box {_show(box)} are cut out of one another "
            "too often: no sharding produces them"
        ) from None


def _tile(box: Box, tiles: Sequence[Tile[T]]) -> Tiling[T]:
    if len(tiles) == 1 and tiles[0].box == box:
        return tiles[0]
    for dim, whole in enumerate(box):
        groups = _group(tiles, dim)
        # A single group that does not span the dim leaves a gap or sticks out, which
        # `_cut` reports.
        if len(groups) > 1 or (groups and _span(groups[0], dim) != whole):
            return _cut(box, dim, groups)
    shown = ", ".join(str(shape_of(t.box)) for t in tiles[:3])
    raise ValueError(
        f"{len(tiles)} parts do not fill the box {_show(box)} exactly once: of shapes "
        f"{shown}{', ...' if len(tiles) > 3 else ''}"
    )


def find(tiling: Tiling[T], box: Box) -> Iterator[tuple[Tile[T], Box]]:
    """Yields each part that overlaps a box, with the overlap."""
    if isinstance(tiling, Tile):
        common = overlap(tiling.box, box)
        if common is not None:
            yield tiling, common
        return
    wanted = box[tiling.dim]
    # From the first section that ends after `wanted` starts to the first that ends at
    # or after its stop.
    first = bisect.bisect_right(tiling.stops, wanted.start)
    last = bisect.bisect_left(tiling.stops, wanted.stop)
    for section in tiling.sections[first : last + 1]:
        yield from find(section, box)


def _group(tiles: Sequence[Tile[T]], dim: int) -> list[list[Tile[T]]]:
    """Groups parts whose ranges along `dim` overlap, in ascending order."""
    groups: list[list[Tile[T]]] = []
    stop = -1
    for part in sorted(tiles, key=lambda t: t.box[dim]):
        if not groups or part.box[dim].start >= stop:
            groups.append([])
        groups[-1].append(part)
        stop = max(stop, part.box[dim].stop)
    return groups


def _cut(box: Box, dim: int, groups: list[list[Tile[T]]]) -> Cut[T]:
    spans = [_span(group, dim) for group in groups]
    ends = [box[dim].start, *(span.stop for span in spans)]
    if [span.start for span in spans] != ends[:-1] or ends[-1] != box[dim].stop:
        raise ValueError(
            f"the parts fill {[tuple(span) for span in spans]} of dim {dim} in "
            f"{_show(box)}: there is a gap, or a part lies outside"
        )
    sections = tuple(
        _tile((*box[:dim], span, *box[dim + 1 :]), group)
        for span, group in zip(spans, groups, strict=True)
    )
    return Cut(dim, tuple(ends[1:]), sections)


def _span(group: list[Tile[T]], dim: int) -> Range:
    return Range(
        min(t.box[dim].start for t in group), max(t.box[dim].stop for t in group)
    )


def _show(box: Box) -> str:
    return "[" + ", ".join(f"{r.start}:{r.stop}" for r in box) + "]"
