"""Checkpoints as lazy sources: shapes at once, bytes when asked for.

`Source` is all the rest of the package knows of a checkpoint, and `DirectSource` one
that can also read into memory it is handed.
"""

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, runtime_checkable

import numpy as np

from bridge._box import Box, as_index, complete, shape_of, span
from bridge._local_path import check_local
from bridge._reorder import copy
from bridge.formats._index import read_sharded
from bridge.formats._other_formats import describe_names
from bridge.formats._ranges import read_bytes, read_range
from bridge.formats._safetensors import TensorInfo, read_header

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


class Source(Protocol):
    """Named tensors that can be measured without being read."""

    @property
    def name(self) -> str:
        """Where the tensors come from, for error messages."""
        ...

    def keys(self) -> tuple[str, ...]:
        """Names of all tensors."""
        ...

    def shape(self, key: str) -> tuple[int, ...]:
        """Shape of one tensor."""
        ...

    def dtype(self, key: str) -> np.dtype:
        """Dtype of one tensor as stored."""
        ...

    def read(self, key: str, slices: tuple[slice, ...] = ()) -> np.ndarray:
        """Reads a tensor, or the box of it that `slices` says; on any thread."""
        ...


@runtime_checkable
class DirectSource(Source, Protocol):
    """A source that needs no memory of its own to read: an extension, for speed."""

    def read_runs(
        self, key: str, start: int, out: Sequence[memoryview], *, ahead: bool
    ) -> None:
        """Reads a tensor from element `start`, as many bytes as `out` takes."""
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
    """Reads a box of a tensor into an array, directly where the source can.

    A box that is one range of the file needs no other memory.

    Args:
      source: The checkpoint.
      key: Name of the tensor.
      box: Which part of it.
      out: Array of the box's shape and the tensor's dtype.
      ahead: Whether what follows in the tensor is wanted next.
      runs: The bytes of `out`, in the runs in which they lie; None if `out` is
        C-contiguous.
    """
    start, stop = span(box, source.shape(key))
    if isinstance(source, DirectSource) and out.size == stop - start:
        runs = [out.reshape(-1).view(np.uint8).data] if runs is None else runs
        source.read_runs(key, start, runs, ahead=ahead)
    else:
        copy(out, source.read(key, as_index(box)))


@dataclasses.dataclass(frozen=True)
class SafetensorsSource:
    """One or more safetensors files seen as one set of tensors.

    Args:
      name: The path that was opened.
      tensors: Where each tensor lies.
    """

    name: str
    tensors: Mapping[str, TensorInfo]

    def keys(self) -> tuple[str, ...]:
        """Names of all tensors, in file order."""
        return tuple(self.tensors)

    def shape(self, key: str) -> tuple[int, ...]:
        """Shape of one tensor."""
        return self.tensors[key].shape

    def dtype(self, key: str) -> np.dtype:
        """Dtype of one tensor as stored."""
        return self.tensors[key].dtype

    def read(self, key: str, slices: tuple[slice, ...] = ()) -> np.ndarray:
        """Reads a tensor, or a box of it.

        A range of the first dim is read to the byte. Any other box lies scattered in
        the file: the one range that covers it is read, and cut.

        Args:
          key: Name of the tensor.
          slices: Up to one slice a dim, of step 1; dims without one are read whole.

        Returns:
          A new array, or a view of what was read.

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
        # From the first element of the box to its last, the tensor's own strides
        # pick the box out of the covering range.
        return np.ndarray(shape, info.dtype, data, strides=_byte_strides(info))

    def read_runs(
        self, key: str, start: int, out: Sequence[memoryview], *, ahead: bool
    ) -> None:
        """Reads a range of a tensor into memory.

        Args:
          key: Name of the tensor.
          start: First element of the range.
          out: The runs of bytes to fill, one after another.
          ahead: Whether what follows in the tensor is wanted next.
        """
        info = self.tensors[key]
        first = info.offset + start * info.dtype.itemsize
        read_range(info.file, first, out, ahead=ahead)


def open_checkpoint(path: str | os.PathLike[str]) -> Source:
    """Opens a safetensors checkpoint; reads headers only.

    Args:
      path: A `.safetensors` file, or a directory that holds `model.safetensors` or
        `model.safetensors.index.json` with the files it names.

    Returns:
      The checkpoint's tensors, to be read piece by piece.

    Raises:
      FileNotFoundError: If nothing is there.
      ValueError: If it is no such checkpoint, or it is damaged.
    """
    check_local(path)
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"No checkpoint at '{path}': nothing is there.")
    if path.is_dir():
        tensors = _read_directory(path)
    elif path.suffix == ".safetensors":
        tensors = read_header(path)
    else:
        raise ValueError(
            f"'{path}' is no safetensors checkpoint: its name does not end in "
            f".safetensors, and it is no directory.{describe_names([path.name])}"
        )
    return SafetensorsSource(str(path), MappingProxyType(tensors))


def _read_directory(directory: Path) -> dict[str, TensorInfo]:
    names = set(os.listdir(directory))
    if INDEX_NAME not in names and SINGLE_NAME not in names:
        raise ValueError(
            f"'{directory}' is no safetensors checkpoint: it holds neither "
            f"'{SINGLE_NAME}' nor '{INDEX_NAME}'.{describe_names(names)}"
        )
    if INDEX_NAME not in names:
        return read_header(directory / SINGLE_NAME)
    tensors = read_sharded(directory / INDEX_NAME, read_header)
    named = {info.file.name for info in tensors.values()}
    if SINGLE_NAME in names - named:
        raise ValueError(
            f"'{directory}' holds two checkpoints: '{SINGLE_NAME}', and '{INDEX_NAME}' "
            "that does not name it. Remove one of them."
        )
    return tensors


def _byte_strides(info: TensorInfo) -> tuple[int, ...]:
    return tuple(
        math.prod(info.shape[dim + 1 :]) * info.dtype.itemsize
        for dim in range(len(info.shape))
    )
