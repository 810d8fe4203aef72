"""The files of a checkpoint as Hugging Face names them: safetensors, or PyTorch's.

PyTorch's files are read where there are no safetensors; their pickles are parsed as
data, never executed.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from bridge._local_path import check_local
from bridge.formats._index import read_index, read_sharded
from bridge.formats._other_formats import describe_names
from bridge.formats._safetensors import read_header
from bridge.formats._source import SafetensorsSource, Source
from bridge.formats._tensor_source import TensorSource
from bridge.formats._torch_tensors import LazyTensor
from bridge.formats._torch_zip import flatten_tensors, open_torch_file, read_torch_file

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
BIN_INDEX_NAME = "pytorch_model.bin.index.json"
BIN_NAME = "pytorch_model.bin"
TORCH_SUFFIXES = (".bin", ".pt", ".pth")
"""Endings of the files of `torch.save`."""
_MODEL_NAMES = (SINGLE_NAME, INDEX_NAME, BIN_NAME, BIN_INDEX_NAME)

Tensor = TypeVar("Tensor")
"""Location of a tensor, in a type of its file format."""


def open_checkpoint(path: str | os.PathLike[str]) -> Source:
    """Opens a checkpoint of Hugging Face's file names; reads headers only.

    Args:
      path: Path of a directory with `model.safetensors`, or with
        `model.safetensors.index.json` and the files it names; if it has neither, with
        `pytorch_model.bin` or `pytorch_model.bin.index.json`. Or the path of one file:
        `.safetensors`, or `.bin`, `.pt`, `.pth` of `torch.save`, from torch 1.6 or
        newer, whose pickle is parsed as data and never executed.

    Returns:
      Lazy source of the checkpoint's tensors.

    Raises:
      FileNotFoundError: If the path does not exist.
      ValueError: If it is no such checkpoint, is damaged, or requires running code.

    Examples:
      >>> checkpoint = bridge.open_checkpoint("small-llama")
      >>> checkpoint.shape("model.norm.weight")
      (16,)
      >>> checkpoint.read("model.norm.weight", (slice(0, 2),))
      array([1., 1.], dtype=float32)
    """
    check_local(path)
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"No checkpoint at '{path}': nothing is there.")
    if path.is_dir():
        return _open_directory(path)
    if path.suffix == ".safetensors":
        return SafetensorsSource(str(path), MappingProxyType(read_header(path)))
    if path.suffix in TORCH_SUFFIXES:
        return open_torch_file(path)
    raise ValueError(
        f"'{path}' is not a checkpoint: its name ends neither in .safetensors nor in "
        f"{', '.join(TORCH_SUFFIXES)}, and it is not a directory."
        f"{describe_names([path.name])}"
    )


def holds_model(directory: Path) -> bool:
    """Returns whether a directory has a file that `open_checkpoint` begins with."""
    return any((directory / name).is_file() for name in _MODEL_NAMES)


def _open_directory(directory: Path) -> Source:
    names = set(os.listdir(directory))
    if names.isdisjoint(_MODEL_NAMES):
        raise ValueError(
            f"'{directory}' is not a checkpoint: it holds none of "
            f"{', '.join(map(repr, _MODEL_NAMES))}.{describe_names(names)}"
        )
    if names.isdisjoint((SINGLE_NAME, INDEX_NAME)):
        tensors = _read_files(directory, names, BIN_NAME, BIN_INDEX_NAME, _read_torch)
        return TensorSource(str(directory), MappingProxyType(tensors))
    tensors = _read_files(directory, names, SINGLE_NAME, INDEX_NAME, read_header)
    return SafetensorsSource(str(directory), MappingProxyType(tensors))


def _read_files(
    directory: Path,
    names: set[str],
    single: str,
    index: str,
    read_file: Callable[[Path], Mapping[str, Tensor]],
) -> Mapping[str, Tensor]:
    """Returns the location of each tensor of one file, or of those of an index."""
    if index not in names:
        return read_file(directory / single)
    tensors = read_sharded(directory / index, read_file)
    if single in names.difference(read_index(directory / index).values()):
        raise ValueError(
            f"'{directory}' holds two checkpoints: '{single}', and '{index}' that does "
            "not name it. Remove one of them."
        )
    return tensors


def _read_torch(file: Path) -> dict[str, LazyTensor]:
    return flatten_tensors(read_torch_file(file), f"'{file}'")
