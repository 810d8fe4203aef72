"""Lazy views: tensors made of tensors, of which only what is asked for is read."""

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
    """What can be measured without being read."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        ...

    @property
    def dtype(self) -> np.dtype:
        """Its dtype as stored."""
        ...

    def read(self, slices: Slices = ()) -> np.ndarray:
        """Reads it, or the box of it that `slices` says."""
        ...


@dataclasses.dataclass(frozen=True)
class Assembled:
    """A tensor put together from parts that fill it.

    Args:
      shape: Its shape.
      dtype: Its dtype, and that of all parts.
      tiles: Where each part lies.

    Raises:
      ValueError: When the parts are first needed, if they do not fill it exactly once.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    tiles: tuple[Tile[Tensor], ...]

    @functools.cached_property
    def _tiling(self):
        return tile(whole(self.shape), self.tiles)

    def check(self) -> None:
        """Raises a `ValueError` if the parts do not fill it exactly once."""
        if math.prod(self.shape) > 0:
            _ = self._tiling

    def read(self, slices: Slices = ()) -> np.ndarray:
        """Reads the tensor, or a box of it, from the parts that it touches."""
        box = complete(slices, self.shape)
        found = list(find(self._tiling, box)) if 0 not in shape_of(box) else []
        if len(found) == 1:  # all of it: no copy is needed
            return _read_part(*found[0])
        out = np.empty(shape_of(box), self.dtype)
        for part, common in found:
            out[as_index(relative(common, box))] = _read_part(part, common)
        return out


@dataclasses.dataclass(frozen=True)
class Section:
    """A box of a tensor, of whose first dims only one position may be left.

    Args:
      tensor: The tensor.
      box: What of it.
      num_dropped: First dims, each of size 1 in `box`, that the section lacks: the
        layer, or the expert, that it is of.
    """

    tensor: Tensor
    box: Box
    num_dropped: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return shape_of(self.box)[self.num_dropped :]

    @property
    def dtype(self) -> np.dtype:
        """Its dtype as stored."""
        return self.tensor.dtype

    def read(self, slices: Slices = ()) -> np.ndarray:
        """Reads the section, or a box of it."""
        kept = complete(slices, self.shape)
        inner = absolute((*[Range(0, 1)] * self.num_dropped, *kept), self.box)
        return self.tensor.read(as_index(inner)).reshape(shape_of(kept))


@dataclasses.dataclass(frozen=True)
class Replicated:
    """One tensor of which several ranks keep a copy; reading compares them.

    Args:
      copies: Each copy, and where it is, for the error message.
    """

    copies: tuple[tuple[str, Tensor], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.copies[0][1].shape

    @property
    def dtype(self) -> np.dtype:
        """Its dtype as stored."""
        return self.copies[0][1].dtype

    def read(self, slices: Slices = ()) -> np.ndarray:
        """Reads all copies, and returns the first if they are equal bit by bit."""
        (first, tensor), *others = self.copies
        values = tensor.read(slices)
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
    """A tensor that lies in a flat one, in C order.

    Args:
      flat: Of one dim.
      start: Its first element there.
      shape: Its shape.
    """

    flat: Tensor
    start: int
    shape: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:
        """Its dtype as stored."""
        return self.flat.dtype

    def read(self, slices: Slices = ()) -> np.ndarray:
        """Reads the one range that covers what is asked for, and cuts it."""
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
    """Returns what a tensor holds at positions of its first dims, without those."""
    picked = tuple(Range(position, position + 1) for position in positions)
    rest = whole(tensor.shape)[len(positions) :]
    return Section(tensor, (*picked, *rest), len(positions))


def rows(tensor: Tensor, start: int, stop: int) -> Section:
    """Returns rows `start` to `stop` of a tensor."""
    return Section(tensor, (Range(start, stop), *whole(tensor.shape)[1:]))


def concatenate(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """Puts tensors one after another along a dim.

    Raises:
      ValueError: If they differ in dtype, or in another dim.
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
