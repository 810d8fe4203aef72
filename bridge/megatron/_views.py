"""Lazy views: tensors composed of other tensors, reading only the requested box."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from bridge._box import (
    Box,
    Range,
    absolute,
    as_index,
    complete,
    relative,
    shape_of,
    whole,
)
from bridge.megatron._tiling import Tile, find, tile

Slices = tuple[slice, ...]


class Tensor(Protocol):
    """Lazy tensor: shape and dtype are known without reading values."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        ...

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the tensor as stored."""
        ...

    def read(self, slices: Slices = ()) -> np.ndarray:
        """Reads the tensor, or the box of it that `slices` selects."""
        ...


@dataclasses.dataclass(frozen=True)
class Assembled:
    """Tensor assembled from parts that fill it exactly once.

    Args:
      shape: Shape of the tensor.
      dtype: Dtype of the tensor and of all parts.
      tiles: Parts with their boxes in the tensor.

    Raises:
      ValueError: On first use of the parts, not on construction, if they do not fill
        the tensor exactly once.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    tiles: tuple[Tile[Tensor], ...]

    @functools.cached_property
    def _tiling(self):
        return tile(whole(self.shape), self.tiles)

    def check(self) -> None:
        """Raises a `ValueError` if the parts do not fill the tensor exactly once."""
        if math.prod(self.shape) > 0:
            _ = self._tiling

    def read(self, slices: Slices = ()) -> np.ndarray:
        """Reads the tensor, or a box of it, from the parts that overlap the box."""
        box = complete(slices, self.shape)
        found = list(find(self._tiling, box)) if 0 not in shape_of(box) else []
        if len(found) == 1:  # one part covers the box: no copy needed
            return _read_part(*found[0])
        out = np.empty(shape_of(box), self.dtype)
        for part, common in found:
            out[as_index(relative(common, box))] = _read_part(part, common)
        return out


@dataclasses.dataclass(frozen=True)
class Section:
    """Box of a tensor, optionally without some leading dims of size 1.

    Args:
      tensor: Tensor that contains the section.
      box: Box of `tensor` that the section covers.
      num_dropped: Number of leading dims, each of size 1 in `box`, that the section
        drops, such as the layer or expert index.
    """

    tensor: Tensor
    box: Box
    num_dropped: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the section, without the dropped dims."""
        return shape_of(self.box)[self.num_dropped :]

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the tensor as stored."""
        return self.tensor.dtype

    def read(self, slices: Slices = ()) -> np.ndarray:
        """Reads the section, or a box of it."""
        kept = complete(slices, self.shape)
        inner = absolute((*[Range(0, 1)] * self.num_dropped, *kept), self.box)
        return self.tensor.read(as_index(inner)).reshape(shape_of(kept))


@dataclasses.dataclass(frozen=True)
class Replicated:
    """Tensor with a copy on each of several ranks; reading compares the copies.

    Args:
      copies: Pairs of a copy's location, for the error message, and the copy.
    """

    copies: tuple[tuple[str, Tensor], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return self.copies[0][1].shape

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the tensor as stored."""
        return self.copies[0][1].dtype

    def read(self, slices: Slices = ()) -> np.ndarray:
        """Reads all copies and returns the first; raises if any bits differ."""
        (first, tensor), *others = self.copies
        values = tensor.read(slices)
        # Compare bytes, not values: equal NaNs must match.
        bits = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        for other, copy in others:
            theirs = np.ascontiguousarray(copy.read(slices)).reshape(-1).view(np.uint8)
            if not np.array_equal(bits, theirs):
                raise ValueError(
                    f"Copies of one tensor differ: {first}, and {other}. The ranks had "
                    "drifted apart when this was saved, or a file is of another "
                    "checkpoint: no copy can be preferred."
                )
        return values


@dataclasses.dataclass(frozen=True)
class Unflattened:
    """Tensor stored in C order within a flat tensor.

    Args:
      flat: One-dimensional tensor that contains the values.
      start: Index in `flat` of the first element.
      shape: Shape of the tensor.
    """

    flat: Tensor
    start: int
    shape: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the tensor as stored."""
        return self.flat.dtype

    def read(self, slices: Slices = ()) -> np.ndarray:
        """Reads the range of rows that covers the requested box, then slices it."""
        box = complete(slices, self.shape)
        rows = box[0] if box else Range(0, 1)
        row = math.prod(self.shape[1:])
        covering = slice(self.start + rows.start * row, self.start + rows.stop * row)
        values = self.flat.read((covering,))
        shape = (rows.stop - rows.start, *self.shape[1:])[: len(self.shape)]
        return values.reshape(shape)[(slice(None), *as_index(box[1:]))[: len(box)]]


def _read_part(part: Tile[Tensor], box: Box) -> np.ndarray:
    return part.part.read(as_index(relative(box, part.box)))


def section(tensor: Tensor, *positions: int) -> Section:
    """Returns a tensor indexed at `positions` of its leading dims, which it drops."""
    picked = tuple(Range(position, position + 1) for position in positions)
    rest = whole(tensor.shape)[len(positions) :]
    return Section(tensor, (*picked, *rest), len(positions))


def rows(tensor: Tensor, start: int, stop: int) -> Section:
    """Returns rows `start` to `stop` of a tensor."""
    return Section(tensor, (Range(start, stop), *whole(tensor.shape)[1:]))


def concatenate(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenates tensors lazily along a dim.

    Raises:
      ValueError: If the tensors differ in dtype or in the size of any other dim.
    """
    if len(tensors) == 1:
        return tensors[0]
    frames = {(t.dtype, *t.shape[:dim], *t.shape[dim + 1 :]) for t in tensors}
    if len(frames) > 1:
        shown = ", ".join(f"{t.dtype}{list(t.shape)}" for t in tensors)
        raise ValueError(f"{shown} cannot be put together along dim {dim}")
    shape, start, tiles = list(tensors[0].shape), 0, []
    for tensor in tensors:
        box = list(whole(tensor.shape))
        box[dim] = Range(start, start + tensor.shape[dim])
        start = box[dim].stop
        tiles.append(Tile(tuple(box), tensor))
    shape[dim] = start
    return Assembled(tuple(shape), tensors[0].dtype, tuple(tiles))
