"""Bands: sections split into reads of bounded size, each shared by several shards."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

from bridge._box import Box, Range, absolute, cover, overlap, relative, span
from bridge.rules._layout import Layout, Move
from bridge.rules._piece import Piece

# Measured: fewer rows give short runs in the destination, more exceed the cache.
_BAND_ROWS = 768
BAND_BYTES = 8 << 20
"""Maximum bytes of one read."""


Stack = tuple[Box, ...]
"""Boxes, without stacked dims, of shards that share one array."""


@dataclasses.dataclass(frozen=True)
class Part:
    """Data that one shard, or several in the same way, take from a read.

    Args:
      stack: Boxes of the shards in the destination array, which identify it.
      where: Destination box: the range of shards, then the box within each of them.
      cut: Box of the data within the read.
      move: Conversion from source to destination, with the shards as leading dim.
    """

    stack: Stack
    where: Box
    cut: Box
    move: Move


@dataclasses.dataclass(frozen=True)
class Read:
    """Read of one box of a tensor, and the use of its data.

    Args:
      box: Region of the tensor to read.
      parts: Data that shards take from it.
    """

    box: Box
    parts: tuple[Part, ...]


@dataclasses.dataclass(frozen=True)
class Section:
    """Properties shared by the sections of all layers of a stack.

    Args:
      layout: Layout between source and destination.
      sizes: Name and size of each dim that the layout names.
      source_box: Section of the tensor.
      box: Section of the leaf, without stacked dims.
      row_elements: Number of elements in a row of the tensor; 0 if it has no rows.
    """

    layout: Layout
    sizes: tuple[tuple[str, int], ...]
    source_box: Box
    box: Box
    row_elements: int

    @classmethod
    def of(cls, piece: Piece) -> "Section":
        """Returns the section of a piece: equal for all layers of a stack."""
        shape = piece.source_shape
        return cls(
            layout=piece.layout,
            sizes=tuple(sorted(piece.sizes.items())),
            source_box=piece.source_box,
            box=piece.inner_box,
            row_elements=shape[-1] if len(shape) > 1 else 0,
        )

    def bands(self, itemsize: int) -> list[Box]:
        """Splits the section into boxes of the leaf, in the order of the source.

        Args:
          itemsize: Bytes per element of the source.
        """
        max_elements = BAND_BYTES // itemsize
        if self.row_elements:
            max_elements = min(max_elements, _BAND_ROWS * self.row_elements)
        return _bands(self, max_elements)


@functools.lru_cache(maxsize=256)  # sections recur in every layer, as in `reads`
def _bands(section: Section, max_elements: int) -> list[Box]:
    inside = section.layout.bands(dict(section.sizes), max_elements)
    return [absolute(band, section.box) for band in inside]


@functools.lru_cache(maxsize=4096)  # a model has few kinds of layers, but many layers
def reads(section: Section, stacks: tuple[Stack, ...], band: Box) -> tuple[Read, ...]:
    """Returns the reads of a band: each byte once, however many shards need it.

    Args:
      section: Section of the leaf.
      stacks: Boxes, without stacked dims, of the shards that store the section's
        position in the stacked dims.
      band: Part of the section.

    Returns:
      Reads in the order of the source, without data that no shard needs.
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
    """Returns the number of elements read for shards, given without stacked dims."""
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
    """Yields the reads for part of a shard, each with its destination."""
    sizes = dict(section.sizes)
    for inside in section.layout.split(relative(common, section.box), sizes):
        source_box, move = section.layout.cut(inside, sizes)
        where = relative(absolute(inside, section.box), stack[shard])
        to_read = absolute(source_box, section.source_box)
        yield _Wish(to_read, stack, shard, where, move)


def _sharing_rows(wishes: list[_Wish]) -> list[list[_Wish]]:
    """Groups the reads of overlapping rows, so that each row is read once.

    Eight shards along rows are eight reads of an eighth. Eight shards along columns
    are one read of everything: eight separate reads would read the file eight times.
    """
    groups, end = [], -1
    for wish in sorted(wishes, key=lambda wish: wish.to_read):
        rows = wish.to_read[:1]
        # Sorted by first row: rows that begin before the group's end overlap it.
        if groups and (not rows or rows[0].start < end):
            groups[-1].append(wish)
        else:
            groups.append([wish])
        end = max([end, *(r.stop for r in rows)])
    return groups


def _side_by_side(group: list[_Wish]) -> list[list[_Wish]]:
    """Groups consecutive shards that take consecutive boxes of one dim alike.

    One copy then fills all shards of a group.
    """
    runs: list[list[_Wish]] = []
    for wish in sorted(group, key=lambda wish: (wish.stack, wish.where, wish.shard)):
        # The last two reads of a run fix the dim along which the next must follow.
        last = runs[-1][-2:] if runs else []
        dims = {_dim_to(*pair) for pair in itertools.pairwise([*last, wish])}
        if len(dims) == 1 and None not in dims:
            runs[-1].append(wish)
        else:
            runs.append([wish])
    return runs


def _dim_to(wish: _Wish, after: _Wish) -> int | None:
    """Returns the dim along which the next shard's box follows, if else equal."""
    pairs = list(zip(wish.to_read, after.to_read, strict=True))
    moved = [dim for dim, (r, s) in enumerate(pairs) if r != s]
    alike = wish._replace(shard=wish.shard + 1, to_read=after.to_read) == after
    follows = [dim for dim in moved if pairs[dim][0].stop == pairs[dim][1].start]
    return follows[0] if alike and len(moved) == len(follows) == 1 else None


def _part(section: Section, box: Box, run: list[_Wish]) -> Part:
    """Returns the part of a read that fills a run of shards."""
    first = run[0]
    dim = _dim_to(*run[:2]) if len(run) > 1 else None
    # The shards follow each other along source dim `dim`, before its factors.
    place = sum(map(len, section.layout.source[: dim or 0]))
    return Part(
        stack=first.stack,
        where=(Range(first.shard, first.shard + len(run)), *first.where),
        cut=relative(cover([wish.to_read for wish in run]), box),
        move=first.move.beside(len(run), place),
    )
