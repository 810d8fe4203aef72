"""Bands: a section cut into single reads of bounded size, each for several shards."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

from bridge._box import Box, Range, absolute, cover, overlap, relative, span
from bridge.rules._layout import Layout, Move
from bridge.rules._piece import Piece

# As measured: fewer rows make short runs in the destination, more leave the cache.
_BAND_ROWS = 768
BAND_BYTES = 8 << 20
"""Bytes that a thread reads at a time."""


Stack = tuple[Box, ...]
"""Shards that lie in one array, by their boxes without stacked dims."""


@dataclasses.dataclass(frozen=True)
class Part:
    """What one shard takes from a read, or several, all of them alike.

    Args:
      stack: The array, by the boxes of its shards.
      where: Which of the shards, and where in each of them it goes.
      cut: What of the read is taken.
      move: How it is laid out, a dim for the shards first.
    """

    stack: Stack
    where: Box
    cut: Box
    move: Move


@dataclasses.dataclass(frozen=True)
class Read:
    """One range of a tensor, or a little more, and what becomes of it.

    Args:
      box: The part of the tensor that is read.
      parts: What the shards take from it.
    """

    box: Box
    parts: tuple[Part, ...]


@dataclasses.dataclass(frozen=True)
class Section:
    """What the sections of all layers of a stack have in common.

    Args:
      layout: How source and destination hold the same numbers.
      sizes: Name and size of each dim that the layout names.
      source_box: The section in the tensor.
      box: The section in the leaf, without stacked dims.
      row_elements: Numbers in a row of the tensor.
    """

    layout: Layout
    sizes: tuple[tuple[str, int], ...]
    source_box: Box
    box: Box
    row_elements: int

    @classmethod
    def of(cls, piece: Piece) -> "Section":
        """Returns what a piece shares with those of other layers."""
        shape = piece.source_shape
        return cls(
            layout=piece.layout,
            sizes=tuple(sorted(piece.sizes.items())),
            source_box=piece.source_box,
            box=piece.inner_box,
            row_elements=shape[-1] if len(shape) > 1 else 0,
        )

    def bands(self, itemsize: int) -> list[Box]:
        """Cuts the section, in the order of the source, into boxes of the leaf.

        Args:
          itemsize: Bytes of a number in the source.
        """
        max_elements = BAND_BYTES // itemsize
        if self.row_elements:
            max_elements = min(max_elements, _BAND_ROWS * self.row_elements)
        return _bands(self, max_elements)


@functools.lru_cache(maxsize=256)  # as below
def _bands(section: Section, max_elements: int) -> list[Box]:
    inside = section.layout.bands(dict(section.sizes), max_elements)
    return [absolute(band, section.box) for band in inside]


@functools.lru_cache(maxsize=4096)  # a model has few kinds of layers, and many layers
def reads(section: Section, stacks: tuple[Stack, ...], band: Box) -> tuple[Read, ...]:
    """Returns what to read of a band, each byte once however many shards need it.

    Args:
      section: The section.
      stacks: Boxes of the shards that hold its place in the stacked dims, without
        those dims.
      band: Part of the section.

    Returns:
      Reads in the order of the source; none of what no shard needs.
    """
    wishes = [
        wish
        for stack in stacks
        for shard in range(len(stack))
        if (common := overlap(stack[shard], band)) is not None
        for wish in _wishes(section, stack, shard, common)
    ]
    found = []
    for group in _sharing_rows(wishes):
        box = cover([wish.to_read for wish in group])
        parts = [_part(section, box, run) for run in _side_by_side(group)]
        found.append(Read(box, tuple(parts)))
    return tuple(found)


def elements_to_read(piece: Piece, shards: tuple[Box, ...]) -> int:
    """Returns how many numbers are read for some shards, without stacked dims."""
    section = Section.of(piece)
    spans = [
        span(read.box, piece.source_shape)
        for band in section.bands(itemsize=1)
        for read in reads(section, tuple((shard,) for shard in shards), band)
    ]
    return sum(r.stop - r.start for r in spans)


class _Wish(NamedTuple):
    to_read: Box
    stack: Stack
    shard: int
    where: Box
    move: Move


def _wishes(section: Section, stack: Stack, shard: int, common: Box) -> Iterator[_Wish]:
    """Yields what is to be read for part of a shard, and what becomes of it."""
    sizes = dict(section.sizes)
    for inside in section.layout.split(relative(common, section.box), sizes):
        source_box, move = section.layout.cut(inside, sizes)
        where = relative(absolute(inside, section.box), stack[shard])
        to_read = absolute(source_box, section.source_box)
        yield _Wish(to_read, stack, shard, where, move)


def _sharing_rows(wishes: list[_Wish]) -> list[list[_Wish]]:
    """Groups shards that need the same rows of the file, to read those once.

    Eight shards of the rows are eight reads of an eighth; eight shards of the columns
    are one read of everything, where one each would read the file eight times.
    """
    groups, end = [], -1
    for wish in sorted(wishes, key=lambda wish: wish.to_read):
        rows = wish.to_read[:1]
        if groups and (not rows or rows[0].start < end):
            groups[-1].append(wish)
        else:
            groups.append([wish])
        end = max([end, *(r.stop for r in rows)])
    return groups


def _side_by_side(group: list[_Wish]) -> list[list[_Wish]]:
    """Groups shards that take alike what follows in one dim: one copy fills them."""
    runs: list[list[_Wish]] = []
    for wish in sorted(group, key=lambda wish: (wish.stack, wish.where, wish.shard)):
        last = runs[-1][-2:] if runs else []
        dims = {_dim_to(*pair) for pair in itertools.pairwise([*last, wish])}
        if len(dims) == 1 and None not in dims:
            runs[-1].append(wish)
        else:
            runs.append([wish])
    return runs


def _dim_to(wish: _Wish, after: _Wish) -> int | None:
    """Returns the dim in which the next shard's wish follows, if it is alike."""
    pairs = list(zip(wish.to_read, after.to_read, strict=True))
    moved = [dim for dim, (r, s) in enumerate(pairs) if r != s]
    alike = wish._replace(shard=wish.shard + 1, to_read=after.to_read) == after
    follows = [dim for dim in moved if pairs[dim][0].stop == pairs[dim][1].start]
    return follows[0] if alike and len(moved) == len(follows) == 1 else None


def _part(section: Section, box: Box, run: list[_Wish]) -> Part:
    """Says what becomes of what a run of shards takes of a read."""
    first = run[0]
    dim = _dim_to(*run[:2]) if len(run) > 1 else None
    place = sum(map(len, section.layout.source[: dim or 0]))
    return Part(
        stack=first.stack,
        where=(Range(first.shard, first.shard + len(run)), *first.where),
        cut=relative(cover([wish.to_read for wish in run]), box),
        move=first.move.beside(len(run), place),
    )
