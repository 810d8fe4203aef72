"""Layouts as data: `"(heads head_dim) embed -> embed heads head_dim"`.

A pattern, unlike a function, can be inverted by swapping its sides, checked against
shapes before a byte is read, and asked which part of the source a shard of the
destination needs. Only permutations and reshapes can be written, so what goes in
comes out bit by bit.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping

import numpy as np

from bridge._box import Box, Range, relative, shape_of, take, whole

Sizes = Mapping[str, int]
Side = tuple[tuple[str, ...], ...]
Ranges = dict[str, Range]


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a source tensor and a destination array hold the same numbers.

    Args:
      source: For each dim of the source the names of its factors, slowest first.
      destination: The same for the destination, with the same names.
    """

    source: Side
    destination: Side

    @classmethod
    def parse(cls, pattern: str) -> "Layout":
        """Reads `"source dims -> destination dims"`; parentheses group factors.

        Raises:
          ValueError: If the pattern is malformed, or its two sides do not name the
            same dims once each.
        """
        return _parse(pattern)

    def invert(self) -> "Layout":
        """Returns the layout from destination to source."""
        return Layout(self.destination, self.source)

    def source_shape(self, sizes: Sizes) -> tuple[int, ...]:
        """Shape of the source, given the size of each named dim."""
        return tuple(math.prod(sizes[name] for name in dim) for dim in self.source)

    def destination_shape(self, sizes: Sizes) -> tuple[int, ...]:
        """Shape of the destination, given the size of each named dim."""
        return self.invert().source_shape(sizes)

    def apply(self, array: np.ndarray, sizes: Sizes) -> np.ndarray:
        """Lays a whole source tensor out as the destination; a view if it can be."""
        return self.apply_box(array, whole(self.destination_shape(sizes)), sizes)

    def source_box(self, box: Box, sizes: Sizes) -> Box:
        """Returns the smallest readable box of the source that covers a shard.

        A shard on the leading factor of a source dim, or on a whole source dim, is
        exactly a box of the source. One on an inner factor (`head_dim` of
        `(heads head_dim)`) is strided in it: the dim is then read whole, to be cut.

        Args:
          box: The part of the destination that is wanted.
          sizes: Size of each named dim.
        """
        return self.cut(box, sizes)[0]

    def apply_box(self, piece: np.ndarray, box: Box, sizes: Sizes) -> np.ndarray:
        """Turns what was read for a shard into the shard.

        Args:
          piece: The source at `source_box(box, sizes)`.
          box: The part of the destination that is wanted.
          sizes: Size of each named dim.

        Returns:
          The destination at `box`; a view of `piece` if it can be.
        """
        return self.cut(box, sizes)[1](piece)

    def cut(self, box: Box, sizes: Sizes) -> tuple[Box, "Move"]:
        """Returns `source_box`, and what `apply_box` then does, to do it many times."""
        wanted = _split(self.destination, box, sizes)
        # Widened until each dim of the source is one range.
        source_box = _join(self.source, wanted, sizes)
        read = _split(self.source, source_box, sizes)
        source_order, order = _names(self.source), _names(self.destination)
        cover = _join(self.destination, wanted, sizes)
        return source_box, Move(
            factors=shape_of(tuple(read[name] for name in source_order)),
            order=tuple(map(source_order.index, order)),
            inside=relative(
                tuple(wanted[name] for name in order),
                tuple(read[name] for name in order),
            ),
            joined=shape_of(cover),
            wanted=relative(box, cover),
        )

    def split(self, box: Box, sizes: Sizes) -> list[Box]:
        """Cuts part of the destination into boxes that are one range of each factor.

        Reshaped to its factors, such a box is a view, to be read and written alike.
        Most boxes are so; one that begins or ends inside a block of
        `(heads head_dim)` is two or three of them.
        """
        dims = zip(self.destination, box, strict=True)
        parts = [_blocks(r, [sizes[name] for name in dim]) for dim, r in dims]
        return list(itertools.product(*parts))

    def bands(self, sizes: Sizes, max_elements: int) -> list[Box]:
        """Cuts the destination into boxes, each of them one range of the source.

        Read one after another they are the source from its first byte to its last. A
        dim of the destination that runs across the source's order (`(b a)` of `a b`)
        cannot be cut so along its inner factor; the bands are then larger.

        Args:
          sizes: Size of each named dim.
          max_elements: Numbers in a band, if the layout lets it be.
        """
        names = _names(self.source)
        inner = [math.prod(sizes[n] for n in names[k + 1 :]) for k in range(len(names))]
        fits = (k for k, count in enumerate(inner) if count <= max_elements)
        for k in range(next(fits, len(names) - 1), -1, -1) if names else ():
            step = max(1, max_elements // max(1, inner[k]))
            ranges = list(_ranges(names, k, step, sizes))
            boxes = [_join(self.destination, cut, sizes) for cut in ranges]
            if all(map(_is_exact, boxes, ranges)):
                return boxes
        return [whole(self.destination_shape(sizes))]


@dataclasses.dataclass(frozen=True)
class Move:
    """What numpy does to lay a box out: only views, where memory allows it.

    Args:
      factors: Shape of what was read, one dim for each factor.
      order: Where each factor of the destination is found.
      inside: What of the factors is needed.
      joined: Shape once factors are joined to dims.
      wanted: What of that is the box.
    """

    factors: tuple[int, ...]
    order: tuple[int, ...]
    inside: Box
    joined: tuple[int, ...]
    wanted: Box

    @property
    def keeps_order(self) -> bool:
        """Whether numbers that follow each other still do."""
        return self.order == tuple(sorted(self.order))

    @property
    def keeps_rows(self) -> bool:
        """Whether they do at least in each row of what was read."""
        return self.order[-1:] in ((), (len(self.order) - 1,))

    def beside(self, count: int, place: int) -> "Move":
        """Returns what lays out as many boxes at once, which follow each other.

        Args:
          count: How many boxes were read as one.
          place: Which factor of what was read goes on from box to box.

        Returns:
          The same for each, the boxes themselves the first dim.
        """
        moved = tuple(i + (i >= place) for i in self.order)
        return Move(
            factors=(*self.factors[:place], count, *self.factors[place:]),
            order=(place, *moved),
            inside=(Range(0, count), *self.inside),
            joined=(count, *self.joined),
            wanted=(Range(0, count), *self.wanted),
        )

    def view(self, array: np.ndarray) -> np.ndarray:
        """Returns what was read, or is to be written, by factors of the destination."""
        return take(array.reshape(self.factors).transpose(self.order), self.inside)

    def __call__(self, array: np.ndarray) -> np.ndarray:
        """Lays out what was read for the box; a copy, if factors lie apart."""
        return take(self.view(array).reshape(self.joined), self.wanted)


def _names(side: Side) -> list[str]:
    return [name for dim in side for name in dim]


def _split(side: Side, box: Box, sizes: Sizes) -> Ranges:
    """Returns a range for each factor whose product covers a box of the dims."""
    ranges: Ranges = {}
    for dim, piece in zip(side, box, strict=True):
        if len(dim) == 1:
            ranges[dim[0]] = piece
            continue
        start, stop = piece.start, piece.stop
        for position, name in enumerate(dim):
            inner = math.prod(sizes[other] for other in dim[position + 1 :])
            first, last = start // inner, -(-stop // inner)
            ranges[name] = Range(first, last)
            if last - first == 1:
                start, stop = start - first * inner, stop - first * inner
            else:  # a range over several blocks takes each of them whole
                start, stop = 0, inner
    return ranges


def _blocks(wanted: Range, sizes: list[int]) -> list[Range]:
    """Cuts a range of a dim where a block of its factors begins or ends."""
    inner = math.prod(sizes[1:])
    if len(sizes) < 2 or not inner:
        return [wanted]
    first, last = -(-wanted.start // inner) * inner, wanted.stop // inner * inner
    if first > last:  # inside one block
        return _shifted(Range(*wanted), last, sizes[1:])
    found = [Range(first, last)] if first < last else []
    if wanted.start < first:
        head = Range(wanted.start, first)
        found = [*_shifted(head, first - inner, sizes[1:]), *found]
    if last < wanted.stop:
        found += _shifted(Range(last, wanted.stop), last, sizes[1:])
    return found


def _shifted(wanted: Range, origin: int, sizes: list[int]) -> list[Range]:
    inside = _blocks(Range(wanted.start - origin, wanted.stop - origin), sizes)
    return [Range(r.start + origin, r.stop + origin) for r in inside]


def _ranges(names: list[str], k: int, step: int, sizes: Sizes) -> Iterator[Ranges]:
    """Yields `step` places of factor `k` at a time, outer ones singly, inner whole."""
    inner = {name: Range(0, sizes[name]) for name in names[k + 1 :]}
    for outer in itertools.product(*(range(sizes[name]) for name in names[:k])):
        single = (Range(i, i + 1) for i in outer)
        fixed = dict(zip(names[:k], single, strict=True)) | inner
        for start in range(0, sizes[names[k]], step):
            stop = min(start + step, sizes[names[k]])
            yield fixed | {names[k]: Range(start, stop)}


def _is_exact(box: Box, ranges: Ranges) -> bool:
    wanted = math.prod(r.stop - r.start for r in ranges.values())
    return math.prod(shape_of(box)) == wanted


def _join(side: Side, ranges: Ranges, sizes: Sizes) -> Box:
    """Returns the smallest box, splittable into factors, that covers ranges."""
    box = []
    for dim in side:
        if len(dim) == 1:
            box.append(ranges[dim[0]])
            continue
        start, stop, several = 0, 1, False
        for name in dim:
            first, last = (0, sizes[name]) if several else ranges[name]
            start, stop = start * sizes[name] + first, (stop - 1) * sizes[name] + last
            several = several or last - first != 1
        box.append(Range(start, stop))
    return tuple(box)


@functools.cache
def _parse(pattern: str) -> Layout:
    sides = pattern.split("->")
    if len(sides) != 2:
        raise ValueError(f"Layout {pattern!r} must have one '->'.")
    source, destination = (_parse_side(pattern, side) for side in sides)
    left = [name for dim in source for name in dim]
    right = [name for dim in destination for name in dim]
    twice = sorted({n for names in (left, right) for n in names if names.count(n) > 1})
    if twice or set(left) != set(right):
        raise ValueError(
            f"Layout {pattern!r} must name the same dims once on each side; "
            f"twice on one side: {twice}, "
            f"on one side only: {sorted(set(left) ^ set(right))}."
        )
    return Layout(source, destination)


def _parse_side(pattern: str, side: str) -> Side:
    if not re.fullmatch(
        r"\s*(([a-z]\w*|\(\s*[a-z]\w*(\s+[a-z]\w*)*\s*\))(\s+|$))*", side
    ):
        raise ValueError(
            f"Layout {pattern!r}: '{side.strip()}' is not a list of names and "
            "(groups of names), such as '(heads head_dim) embed'."
        )
    return tuple(
        tuple(token.strip("() ").split())
        for token in re.findall(r"\([^)]*\)|\w+", side)
    )
