"""Bands: a section cut into single reads of bounded size, each for several shards."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import NamedTuple

from bridge._box import Box, absolute, cover, overlap, relative, span
from bridge._layout import Layout, Move
from bridge._piece import Piece

# As measured: fewer rows make short runs in the destination, more leave the cache.
_BAND_ROWS = 512
BAND_BYTES = 8 << 20
"""Bytes that a thread reads at a time."""


@dataclasses.dataclass(frozen=True)
class Part:
    """What one shard takes from a band.

    Args:
      shard: The shard, by its box without stacked dims.
      where: Where in the shard it goes.
      cut: What of the band is taken.
      move: How it is laid out.
    """

    shard: Box
    where: Box
    cut: Box
    move: Move


@dataclasses.dataclass(frozen=True)
class Band:
    """One read, and what becomes of it.

    Args:
      box: The part of the source tensor that is read.
      parts: What the shards take from it.
    """

    box: Box
    parts: tuple[Part, ...]


def bands(piece: Piece, shards: tuple[Box, ...], itemsize: int) -> tuple[Band, ...]:
    """Cuts a section so that each byte is read once, however many shards need it.

    Args:
      piece: The section.
      shards: Boxes of the shards that hold its place in the stacked dims, without
        those dims.
      itemsize: Bytes of a number in the source.

    Returns:
      What to read, in the order of the source; nothing that no shard needs.
    """
    max_elements = BAND_BYTES // itemsize
    if len(piece.source_shape) > 1:
        max_elements = min(max_elements, _BAND_ROWS * piece.source_shape[-1])
    sizes = tuple(sorted(piece.sizes.items()))
    section = _Section(piece.layout, sizes, piece.source_box, piece.inner_box)
    return _bands(section, shards, max_elements)


def elements_to_read(piece: Piece, shards: tuple[Box, ...]) -> int:
    """Returns how many numbers are read for some shards, their boxes as in `bands`."""
    spans = [
        span(band.box, piece.source_shape) for band in bands(piece, shards, itemsize=1)
    ]
    return sum(r.stop - r.start for r in spans)


@dataclasses.dataclass(frozen=True)
class _Section:
    """What all layers of a stacked leaf have in common."""

    layout: Layout
    sizes: tuple[tuple[str, int], ...]
    source_box: Box
    box: Box

    def wishes(self, shard: Box, common: Box) -> Iterator["_Wish"]:
        """Yields what is to be read for part of a shard, and what becomes of it."""
        sizes = dict(self.sizes)
        for inside in self.layout.split(relative(common, self.box), sizes):
            source_box, move = self.layout.cut(inside, sizes)
            where = relative(absolute(inside, self.box), shard)
            yield _Wish(absolute(source_box, self.source_box), shard, where, move)


class _Wish(NamedTuple):
    to_read: Box
    shard: Box
    where: Box
    move: Move


@functools.lru_cache(maxsize=256)  # a model has few kinds of layers, and many layers
def _bands(
    section: _Section, shards: tuple[Box, ...], max_elements: int
) -> tuple[Band, ...]:
    found = []
    for inside in section.layout.bands(dict(section.sizes), max_elements):
        band = absolute(inside, section.box)
        wishes = [
            wish
            for shard in shards
            if (common := overlap(shard, band)) is not None
            for wish in section.wishes(shard, common)
        ]
        for group in _sharing_rows(wishes):
            read = cover([wish.to_read for wish in group])
            parts = [
                Part(wish.shard, wish.where, relative(wish.to_read, read), wish.move)
                for wish in group
            ]
            found.append(Band(read, tuple(parts)))
    return tuple(found)


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
