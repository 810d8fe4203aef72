"""Layouts as data: `"(heads head_dim) embed -> embed heads head_dim"`.

A pattern, unlike a function, can be inverted by swapping its sides, checked against
shapes before a byte is read, and queried for the part of the source that a shard of
the destination needs. It expresses only permutations and reshapes, so conversion is
bit-exact in both directions.
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
    """Permutation and reshape between a source tensor and a destination array.

    Args:
      source: Names of the factors of each source dim, slowest first.
      destination: Names of the factors of each destination dim, slowest first; the
        same set of names as in `source`.
    """

    source: Side
    destination: Side

    @classmethod
    def parse(cls, pattern: str) -> "Layout":
        """Parses `"source dims -> destination dims"`; parentheses group factors.

        Raises:
          ValueError: If the pattern is malformed, or its two sides do not name the
            same dims once each.
        """
        return _parse(pattern)

    def invert(self) -> "Layout":
        """Returns the layout from destination to source."""
        return Layout(self.destination, self.source)

    def source_shape(self, sizes: Sizes) -> tuple[int, ...]:
        """Returns the shape of the source, given the size of each named dim."""
        return tuple(math.prod(sizes[name] for name in dim) for dim in self.source)

    def destination_shape(self, sizes: Sizes) -> tuple[int, ...]:
        """Returns the shape of the destination, given the size of each named dim."""
        return self.invert().source_shape(sizes)

    def apply(self, array: np.ndarray, sizes: Sizes) -> np.ndarray:
        """Converts an entire source tensor to the destination; a view if possible."""
        return self.apply_box(array, whole(self.destination_shape(sizes)), sizes)

    def source_box(self, box: Box, sizes: Sizes) -> Box:
        """Returns the smallest box of the source that covers a destination shard.

        A shard on the leading factor of a source dim, or on an entire source dim, is
        exactly a box of the source. A shard on an inner factor (`head_dim` of
        `(heads head_dim)`) is strided in the source: the full dim is read and then
        sliced.

        Args:
          box: Requested region of the destination.
          sizes: Size of each named dim.
        """
        return self.cut(box, sizes)[0]

    def apply_box(self, piece: np.ndarray, box: Box, sizes: Sizes) -> np.ndarray:
        """Converts the source region read for a shard to the shard.

        Args:
          piece: Source at `source_box(box, sizes)`.
          box: Requested region of the destination.
          sizes: Size of each named dim.

        Returns:
          Destination at `box`; a view of `piece` if possible.
        """
        return self.cut(box, sizes)[1](piece)

    def cut(self, box: Box, sizes: Sizes) -> tuple[Box, "Move"]:
        """Returns `source_box` and a reusable form of `apply_box` for the same box."""
        wanted = _split(self.destination, box, sizes)
        # Joining widens the factor ranges until each source dim is one range.
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
        """Splits a destination box into boxes that are one range of each factor.

        Such a box, reshaped to its factors, is a view that can be read and written.
        Most boxes already are; a box that begins or ends inside a block of
        `(heads head_dim)` splits into two or three.
        """
        dims = zip(self.destination, box, strict=True)
        parts = [_blocks(r, [sizes[name] for name in dim]) for dim, r in dims]
        return list(itertools.product(*parts))

    def bands(self, sizes: Sizes, max_elements: int) -> list[Box]:
        """Splits the destination into boxes that each are one flat source range.

        In order, they cover the source from its first byte to its last. A destination
        dim whose factors are in another order than in the source (`(b a)` of `a b`)
        cannot be split along its inner factor; the bands are then larger.

        Args:
          sizes: Size of each named dim.
          max_elements: Maximum number of elements in a band, if the layout allows it.
        """
        names = _names(self.source)
        inner = [math.prod(sizes[n] for n in names[k + 1 :]) for k in range(len(names))]
        # Splits the outermost source factor whose inner factors fit into a band. If the
        # destination boxes would cover more than their band, the next outer factor is
        # tried, with larger bands.
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
    """Reshape, transpose and slice that produce a destination box from source data.

    All steps are numpy views where the memory order allows it.

    Args:
      factors: Shape of the source data, one dim per factor.
      order: Source position of each destination factor: the transpose's axes.
      inside: Required range of each destination factor.
      joined: Shape after factors are joined to dims.
      wanted: Requested box within `joined`.
    """

    factors: tuple[int, ...]
    order: tuple[int, ...]
    inside: Box
    joined: tuple[int, ...]
    wanted: Box

    @property
    def keeps_order(self) -> bool:
        """Whether the factors keep their order, so that nothing is transposed."""
        return self.order == tuple(sorted(self.order))

    @property
    def keeps_rows(self) -> bool:
        """Whether the innermost factor stays innermost: rows stay contiguous."""
        return self.order[-1:] in ((), (len(self.order) - 1,))

    def beside(self, count: int, place: int) -> "Move":
        """Returns a move that converts `count` consecutive boxes at once.

        Args:
          count: Number of boxes read together.
          place: Position among the source factors at which the boxes are stacked.

        Returns:
          Move whose result has the boxes as its leading dim.
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
        """Returns a view of the source data in factors of the destination."""
        return take(array.reshape(self.factors).transpose(self.order), self.inside)

    def __call__(self, array: np.ndarray) -> np.ndarray:
        """Converts source data to the box; copies if factors cannot be joined."""
        return take(self.view(array).reshape(self.joined), self.wanted)


def _names(side: Side) -> list[str]:
    return [name for dim in side for name in dim]


def _split(side: Side, box: Box, sizes: Sizes) -> Ranges:
    """Returns one range per factor, whose product covers a box of the dims."""
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
            # Only within a single position of this factor are the inner ones a range.
            if last - first == 1:
                start, stop = start - first * inner, stop - first * inner
            else:  # a range over several blocks needs all of each block
                start, stop = 0, inner
    return ranges


def _blocks(wanted: Range, sizes: list[int]) -> list[Range]:
    """Splits a range of a dim at the boundaries of its blocks of inner factors."""
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
    """Yields `step` positions of factor `k`, one of outer and all of inner factors."""
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
    """Returns the smallest box that covers the factor ranges."""
    box = []
    for dim in side:
        if len(dim) == 1:
            box.append(ranges[dim[0]])
            continue
        start, stop, several = 0, 1, False
        for name in dim:
            # Inside a factor of several positions, only complete inner factors make
            # one range of the dim.
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
