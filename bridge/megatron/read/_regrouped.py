"""Regrouped: a source that presents some tensors in a factored shape."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping

import numpy as np

from bridge._box import Box, Range, as_index, complete, relative, shape_of
from bridge.formats._source import Source


@dataclasses.dataclass(frozen=True)
class Regrouped:
    """Source that presents the first dim of some tensors as several factors.

    A rule can split only along a complete dim. After factoring, the parts of a fused
    projection are such a dim.

    Args:
      source: Source of the tensors.
      shapes: Factored shapes by tensor name: the factors of the first dim, slowest
        first, then the other dims.
    """

    source: Source
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def name(self) -> str:
        """Name of the underlying source, for error messages."""
        return self.source.name

    def keys(self) -> tuple[str, ...]:
        """Returns the names of all tensors."""
        return self.source.keys()

    def shape(self, key: str) -> tuple[int, ...]:
        """Returns a tensor's shape, factored if `shapes` has a matching entry."""
        return self.shapes[key] if self._is_factored(key) else self.source.shape(key)

    def dtype(self, key: str) -> np.dtype:
        """Returns a tensor's dtype as stored."""
        return self.source.dtype(key)

    def read(self, key: str, slices: tuple[slice, ...] = ()) -> np.ndarray:
        """Reads a tensor, or a box of it; rows outside the box are not read.

        Args:
          key: Name of the tensor.
          slices: Slices of step 1, at most one per dim of the factored shape.
        """
        if not self._is_factored(key):
            return self.source.read(key, slices)
        shape = self.shapes[key]
        num_factors = len(shape) - len(self.source.shape(key)) + 1
        box = complete(slices, shape)
        out = np.empty(shape_of(box), self.source.dtype(key))
        rest = as_index(box[num_factors:])
        for part, rows in _contiguous(box[:num_factors], shape[:num_factors]):
            values = self.source.read(key, (slice(*rows), *rest))
            target = out[as_index(relative(part, box[:num_factors]))]
            target[...] = values.reshape(target.shape)
        return out

    def _is_factored(self, key: str) -> bool:
        # A tensor of another size keeps its shape, so that the mismatch is reported.
        return key in self.shapes and flat_shape(
            self.shapes[key], len(self.source.shape(key))
        ) == self.source.shape(key)


def flat_shape(shape: tuple[int, ...], num_dims: int) -> tuple[int, ...]:
    """Merges the leading factors of a factored shape into one dim.

    Args:
      shape: Factors of the first dim, then the other dims.
      num_dims: Number of dims of the result.
    """
    num_factors = len(shape) - num_dims + 1
    return (math.prod(shape[:num_factors]), *shape[num_factors:])


def _contiguous(box: Box, factors: tuple[int, ...]) -> Iterator[tuple[Box, Range]]:
    """Splits a box of the factors into the fewest parts with contiguous rows.

    Yields:
      Pairs of a part and its range of rows.
    """
    # All factors after the last one that is cut are complete, so the rows of one
    # position of the factors before it are contiguous.
    last = max(
        (i for i, r in enumerate(box) if shape_of((r,)) != (factors[i],)), default=0
    )
    block = math.prod(factors[last + 1 :])
    for position in itertools.product(*(range(*r) for r in box[:last])):
        # Index of `position` in C order over the leading factors.
        start = 0
        for number, size in zip(position, factors[:last], strict=True):
            start = start * size + number
        start *= factors[last]
        cut = box[last]
        part = (*(Range(i, i + 1) for i in position), *box[last:])
        yield part, Range((start + cut.start) * block, (start + cut.stop) * block)
