"""Tilings: boxes that fill a larger one, each element once, and quick to search.

A sharded tensor is described by its chunks' boxes. Nothing says that they fill it; and
an expert layer has tens of thousands of them, too many to look through for each of
its tensors. Cutting the whole along planes that no chunk crosses, again and again,
answers both: it ends in single chunks, or at a gap or an overlap.
"""

import bisect
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from bridge._box import Box, Range, overlap, shape_of

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Tile(Generic[T]):
    """One part: its box, and what it is."""

    box: Box
    part: T


@dataclasses.dataclass(frozen=True)
class Cut(Generic[T]):
    """A box cut along one dim.

    Args:
      dim: The dim.
      stops: Where along it each section ends, ascending.
      sections: Their own tilings.
    """

    dim: int
    stops: tuple[int, ...]
    sections: tuple["Tiling[T]", ...]


Tiling = Tile[T] | Cut[T]


def tile(box: Box, tiles: Sequence[Tile[T]]) -> Tiling[T]:
    """Arranges parts so that those in a given box are found at once.

    Args:
      box: What they fill.
      tiles: The parts, in any order.

    Returns:
      The tiling, for `find`.

    Raises:
      ValueError: If an element of `box` is in no part or in two, or a part leaves it.
        Arrangements that no plane divides (pinwheels) are refused too: nobody shards
        so.
    """
    if len(tiles) == 1 and tiles[0].box == box:
        return tiles[0]
    for dim, whole in enumerate(box):
        groups = _group(tiles, dim)
        if len(groups) > 1 or (groups and _span(groups[0], dim) != whole):
            return _cut(box, dim, groups)
    shown = ", ".join(str(shape_of(t.box)) for t in tiles[:3])
    raise ValueError(
        f"{len(tiles)} parts do not fill the box {_show(box)} exactly once: of shapes "
        f"{shown}{', ...' if len(tiles) > 3 else ''}"
    )


def find(tiling: Tiling[T], box: Box) -> Iterator[tuple[Tile[T], Box]]:
    """Yields the parts that a box touches, and what it has in common with each."""
    if isinstance(tiling, Tile):
        common = overlap(tiling.box, box)
        if common is not None:
            yield tiling, common
        return
    wanted = box[tiling.dim]
    first = bisect.bisect_right(tiling.stops, wanted.start)
    last = bisect.bisect_left(tiling.stops, wanted.stop)
    for section in tiling.sections[first : last + 1]:
        yield from find(section, box)


def _group(tiles: Sequence[Tile[T]], dim: int) -> list[list[Tile[T]]]:
    """Groups parts that lie over each other along a dim, in its order."""
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
        tile((*box[:dim], span, *box[dim + 1 :]), group)
        for span, group in zip(spans, groups, strict=True)
    )
    return Cut(dim, tuple(ends[1:]), sections)


def _span(group: list[Tile[T]], dim: int) -> Range:
    return Range(
        min(t.box[dim].start for t in group), max(t.box[dim].stop for t in group)
    )


def _show(box: Box) -> str:
    return "[" + ", ".join(f"{r.start}:{r.stop}" for r in box) + "]"
