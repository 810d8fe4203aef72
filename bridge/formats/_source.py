"""Checkpoints as lazy sources: shapes from headers, data on request.

The rest of the package accesses a checkpoint only as a `Source`; a `DirectSource` can
also read into preallocated memory.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from bridge._box import Box, as_index, complete, shape_of, span
from bridge._reorder import copy
from bridge.formats._ranges import read_bytes, read_range
from bridge.formats._safetensors import TensorInfo, read_metadata
from bridge.formats._tensor_source import NamedTensors


class Source(Protocol):
    """Named tensors whose shapes and dtypes are known without reading their data."""

    @property
    def name(self) -> str:
        """Name of the checkpoint, for error messages."""
        ...

    def keys(self) -> tuple[str, ...]:
        """Returns the names of all tensors."""
        ...

    def shape(self, key: str) -> tuple[int, ...]:
        """Returns the shape of a tensor."""
        ...

    def dtype(self, key: str) -> np.dtype:
        """Returns the stored dtype of a tensor."""
        ...

    def read(self, key: str, slices: tuple[slice, ...] = ()) -> np.ndarray:
        """Reads a tensor, or the region selected by `slices`; thread-safe."""
        ...


@runtime_checkable
class DirectSource(Source, Protocol):
    """Source that reads directly into the caller's memory: optional, for speed."""

    def read_runs(
        self, key: str, start: int, out: Sequence[memoryview], *, ahead: bool
    ) -> None:
        """Reads bytes of a tensor from element `start` on, until `out` is full."""
        ...


def read_into(
    source: Source,
    key: str,
    box: Box,
    out: np.ndarray,
    *,
    ahead: bool,
    runs: Sequence[memoryview] | None = None,
) -> None:
    """Reads a box of a tensor into an array, without a copy if the source allows it.

    A box that is one range of the file needs no other memory.

    Args:
      source: Checkpoint to read.
      key: Name of the tensor.
      box: Region of the tensor.
      out: Array of the box's shape and the tensor's dtype.
      ahead: Whether the following bytes of the tensor are read next.
      runs: Bytes of `out`, one buffer per contiguous run; None if `out` is
        C-contiguous.
    """
    start, stop = span(box, source.shape(key))
    if isinstance(source, DirectSource) and out.size == stop - start:
        runs = [out.reshape(-1).view(np.uint8).data] if runs is None else runs
        source.read_runs(key, start, runs, ahead=ahead)
    else:
        copy(out, source.read(key, as_index(box)))


@dataclasses.dataclass(frozen=True)
class SafetensorsSource(NamedTensors):
    """Tensors of one or more safetensors files.

    Args:
      name: Path that was opened.
      tensors: Location of each tensor by name.
    """

    tensors: Mapping[str, TensorInfo]

    def read(self, key: str, slices: tuple[slice, ...] = ()) -> np.ndarray:
        """Reads a tensor, or the region selected by `slices`.

        For a range of the first dim exactly its bytes are read. Any other box is not
        contiguous in the file: the range that covers it is read, and sliced.

        Args:
          key: Name of the tensor.
          slices: Slices of step 1, at most one per dim; the remaining dims are read
            in full.

        Returns:
          New array, or a view of the bytes read.

        Raises:
          ValueError: If a slice has a step, or there are more slices than dims.
        """
        info = self.tensors[key]
        box = complete(slices, info.shape)
        shape = shape_of(box)
        if 0 in shape:
            return np.empty(shape, info.dtype)
        start, stop = (i * info.dtype.itemsize for i in span(box, info.shape))
        data = read_bytes(info.file, info.offset + start, stop - start)
        # The data begins at the first element of the box, so that the strides of the
        # full tensor select the box in the covering range.
        return np.ndarray(shape, info.dtype, data, strides=_byte_strides(info))

    def metadata(self) -> dict[str, str]:
        """Returns the texts in the headers of all files, by name."""
        files = dict.fromkeys(info.file for info in self.tensors.values())
        return {k: v for file in files for k, v in read_metadata(file).items()}

    def read_runs(
        self, key: str, start: int, out: Sequence[memoryview], *, ahead: bool
    ) -> None:
        """Reads a range of a tensor into memory.

        Args:
          key: Name of the tensor.
          start: First element of the range.
          out: Buffers to fill in order.
          ahead: Whether the following bytes of the tensor are read next.
        """
        info = self.tensors[key]
        first = info.offset + start * info.dtype.itemsize
        read_range(info.file, first, out, ahead=ahead)


def _byte_strides(info: TensorInfo) -> tuple[int, ...]:
    return tuple(
        math.prod(info.shape[dim + 1 :]) * info.dtype.itemsize
        for dim in range(len(info.shape))
    )
