"""What `from_torch` takes: PyTorch's models in memory, and its files by path.

No pickle is run: `.safetensors` have none, and those of `.pt` and `.bin` are read as
data.
"""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bridge.formats._index import read_sharded
from bridge.formats._source import (
    INDEX_NAME,
    SINGLE_NAME,
    SafetensorsSource,
    Source,
    open_checkpoint,
)
from bridge.formats._torch_tensors import LazyTensor
from bridge.formats._torch_zip import (
    TensorSource,
    flatten_tensors,
    open_torch_file,
    read_torch_file,
)
from bridge.pytorch._torch_source import hold, is_module

BIN_NAME = "pytorch_model.bin"
BIN_INDEX_NAME = "pytorch_model.bin.index.json"


def open_torch(source: Any, prefix: str = "") -> Source:
    """Opens what `from_torch` takes; reads no weights.

    Args:
      source: An `nn.Module`, a state dict of tensors or arrays, or the path of a
        `.safetensors` file, of any other file as one that `torch.save` wrote, or of a
        directory: with the names transformers gives, safetensors preferred.
      prefix: Take the tensors whose names begin so, under the rest of their names.

    Raises:
      FileNotFoundError: If nothing is at the path.
      ValueError: If the path is no checkpoint, a value no tensor with data, or no name
        begins with the prefix.
    """
    opened = _open(source)
    return _within(opened, prefix) if prefix else opened


def _open(source: Any) -> Source:
    if isinstance(source, str | os.PathLike):
        return _open_path(Path(source))
    if is_module(source):
        return hold(f"the {type(source).__name__}", source.state_dict())
    if isinstance(source, Mapping):
        return hold("the state dict", source)
    raise ValueError(
        f"A {type(source).__name__} is no PyTorch model: give an nn.Module, a state "
        "dict, or a path."
    )


def _within(source: Source, prefix: str) -> Source:
    assert isinstance(source, TensorSource | SafetensorsSource)
    tensors = {
        key.removeprefix(prefix): tensor
        for key, tensor in source.tensors.items()
        if key.startswith(prefix)
    }
    if not tensors:
        raise ValueError(
            f"No tensor of '{source.name}' has a name that begins with '{prefix}'; "
            f"the first are {list(source.keys()[:3])}."
        )
    return dataclasses.replace(source, tensors=MappingProxyType(tensors))


def _open_path(path: Path) -> Source:
    if path.is_dir() and not any(
        (path / name).is_file() for name in (INDEX_NAME, SINGLE_NAME)
    ):
        if (path / BIN_INDEX_NAME).is_file():
            tensors = read_sharded(path / BIN_INDEX_NAME, _read_file)
            return TensorSource(str(path), MappingProxyType(tensors))
        if (path / BIN_NAME).is_file():
            return open_torch_file(path / BIN_NAME)
    if path.is_file() and path.suffix != ".safetensors":
        return open_torch_file(path)
    return open_checkpoint(path)


def _read_file(file: Path) -> dict[str, LazyTensor]:
    return flatten_tensors(read_torch_file(file), f"'{file}'")
