"""Codes of quantized weights: arrays that are stored plainly, turned or packed."""

import dataclasses
import math
from typing import Protocol

import numpy as np

from bridge._box import Box, Range, as_index
from bridge.formats._source import Source


class Codes(Protocol):
    """Matrix of numbers in a source, read by boxes."""

    @property
    def name(self) -> str:
        """Name of the stored tensor."""
        ...

    def read(self, source: Source, box: Box) -> np.ndarray:
        """Reads the region of a box of rows and columns."""
        ...


@dataclasses.dataclass(frozen=True)
class Plain:
    """Matrix that is stored as it is.

    Args:
      name: Name of the stored tensor.
    """

    name: str

    def read(self, source: Source, box: Box) -> np.ndarray:
        """Reads the region of a box."""
        return source.read(self.name, as_index(box))


@dataclasses.dataclass(frozen=True)
class Column:
    """Matrix of one column, stored as a vector.

    Args:
      name: Name of the stored tensor, of shape `(rows,)`.
    """

    name: str

    def read(self, source: Source, box: Box) -> np.ndarray:
        """Reads the region of a box."""
        return source.read(self.name, as_index(box[:1]))[:, None]


@dataclasses.dataclass(frozen=True)
class Scalar:
    """Matrix of one element, stored with any number of dims.

    Args:
      name: Name of the stored tensor.
    """

    name: str

    def read(self, source: Source, box: Box) -> np.ndarray:
        """Reads the element."""
        del box
        return source.read(self.name).reshape(1, 1)


@dataclasses.dataclass(frozen=True)
class Transposed:
    """Matrix that is stored columns first.

    Args:
      name: Name of the stored tensor, of shape `(columns, rows)`.
    """

    name: str

    def read(self, source: Source, box: Box) -> np.ndarray:
        """Reads the region of a box."""
        return source.read(self.name, as_index(box[::-1])).T


@dataclasses.dataclass(frozen=True)
class Packed:
    """Matrix of codes of a few bits, packed into integers along one dim.

    The integers along the dim are one stream of bits, the lowest bit of each integer
    first; `order` permutes the codes of a unit, the shortest run of codes that fills
    an integer number of integers.

    Args:
      name: Name of the stored tensor.
      bits: Bits per code, 1 to 8.
      dim: The packed dim, 0 or 1.
      order: Place in the unit of each of its codes; None is their own order.
      signed: Whether codes are two's complement.
      added: Number that is added to each stored integer, modulo its range; a code that
        overflows carries into the next one.
    """

    name: str
    bits: int
    dim: int
    order: tuple[int, ...] | None = None
    signed: bool = False
    added: int = 0

    def read(self, source: Source, box: Box) -> np.ndarray:
        """Reads the integers that hold a box, and unpacks its codes.

        Returns:
          Codes, int8 if they are signed, else uint8.
        """
        word_bits = 8 * source.dtype(self.name).itemsize
        words = self.bits // math.gcd(self.bits, word_bits)  # of a unit
        codes = words * word_bits // self.bits  # of a unit
        wanted = box[self.dim]
        units = Range(wanted.start // codes, -(-wanted.stop // codes))
        to_read = list(box)
        to_read[self.dim] = Range(units.start * words, units.stop * words)
        stored = source.read(self.name, as_index(tuple(to_read)))
        stored = stored.view(f"u{word_bits // 8}")
        if self.added:
            stored = stored + stored.dtype.type(self.added)
        found = self._unpack(stored, words, codes)
        first = wanted.start - units.start * codes
        return found[self._along(slice(first, first + wanted.stop - wanted.start))]

    def _unpack(self, stored: np.ndarray, words: int, codes: int) -> np.ndarray:
        shape = list(stored.shape)
        shape[self.dim] = shape[self.dim] // words * codes
        found = np.empty(shape, np.uint8)
        word_bits, mask = 8 * stored.itemsize, (1 << self.bits) - 1
        for code, place in enumerate(self.order or range(codes)):
            word, shift = divmod(place * self.bits, word_bits)
            values = stored[self._along(slice(word, None, words))] >> shift
            if shift + self.bits > word_bits:  # the code continues in the next integer
                high = stored[self._along(slice(word + 1, None, words))]
                values = values | high << (word_bits - shift)
            found[self._along(slice(code, None, codes))] = values & mask
        if not self.signed:
            return found
        half = np.uint8(1 << (self.bits - 1))
        return (found ^ half).view(np.int8) - half.view(np.int8)

    def _along(self, part: slice) -> tuple[slice, ...]:
        return (slice(None),) * self.dim + (part,)
