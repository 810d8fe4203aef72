"""Checkpoints as lazy sources: shapes at once, bytes when asked for.

`Source` is all the rest of the package knows of a checkpoint. Reads are `pread`s of
exact byte ranges: a memory map reads ahead, six times the bytes of a cold eighth.
"""

import dataclasses
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import numpy as np

from bridge._box import complete, shape_of
from bridge._json import parse_json
from bridge._pread import pread
from bridge._safetensors import TensorInfo, read_header

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
        """Reads a tensor, or the box of it that `slices` says."""
        ...


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
        strides = _byte_strides(info)
        first = sum(r.start * n for r, n in zip(box, strides, strict=True))
        last = sum((r.stop - 1) * n for r, n in zip(box, strides, strict=True))
        nbytes = last - first + info.dtype.itemsize
        data = pread(info.file, info.offset + first, nbytes)
        # From the first element of the box to its last, the tensor's own strides
        # pick the box out of the covering range.
        return np.ndarray(shape, info.dtype, data, strides=strides)


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
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"No checkpoint at '{path}': nothing is there.")
    if path.is_file() and path.suffix == ".safetensors":
        tensors = read_header(path)
    elif (path / INDEX_NAME).is_file():
        tensors = _read_sharded(path)
    elif (path / SINGLE_NAME).is_file():
        tensors = read_header(path / SINGLE_NAME)
    else:
        raise ValueError(
            f"'{path}' is no safetensors checkpoint: it is no .safetensors file, and "
            f"no directory with '{SINGLE_NAME}' or '{INDEX_NAME}' in it."
        )
    return SafetensorsSource(str(path), MappingProxyType(tensors))


def _byte_strides(info: TensorInfo) -> tuple[int, ...]:
    return tuple(
        math.prod(info.shape[dim + 1 :]) * info.dtype.itemsize
        for dim in range(len(info.shape))
    )


def _read_sharded(directory: Path) -> dict[str, TensorInfo]:
    subject = f"The index '{directory / INDEX_NAME}'"
    index = parse_json((directory / INDEX_NAME).read_bytes(), subject)
    files = index.get("weight_map")
    if not isinstance(files, dict) or not all(
        isinstance(file, str) for file in files.values()
    ):
        raise ValueError(f"{subject} has no 'weight_map' from tensor to file name.")
    _check_files(subject, directory, set(files.values()))
    found = {
        file: read_header(directory / file) for file in sorted(set(files.values()))
    }
    wrong = [
        f"  tensor {key!r} is not in '{file}'"
        for key, file in files.items()
        if key not in found[file]
    ] + [
        f"  '{file}' holds {key!r}, which the index "
        + (f"places in '{files[key]}'" if key in files else "does not name")
        for file, tensors in found.items()
        for key in tensors
        if files.get(key) != file
    ]
    if wrong:
        raise ValueError(f"{subject} does not fit its files:\n" + "\n".join(wrong))
    return {key: found[file][key] for key, file in files.items()}


def _check_files(subject: str, directory: Path, files: set[str]) -> None:
    # An index is a stranger's text: a plain file name cannot leave the directory.
    wrong = [
        f"  '{file}' " + ("is absent" if Path(file).name == file else "is no file name")
        for file in sorted(files)
        if Path(file).name != file or not (directory / file).is_file()
    ]
    if wrong:
        raise ValueError(
            f"{subject} names files that are not in the directory:\n" + "\n".join(wrong)
        )
