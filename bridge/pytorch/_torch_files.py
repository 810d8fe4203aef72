"""Sources for `from_torch`: PyTorch models in memory, and files by path.

Pickles are never executed: `.safetensors` files contain none, and those in `.pt` and
`.bin` files are parsed as data.
"""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bridge.formats._source import SafetensorsSource, Source
from bridge.formats._tensor_source import TensorSource
from bridge.formats._torch_zip import open_torch_file
from bridge.formats._weight_files import holds_model, open_checkpoint
from bridge.pytorch._torch_source import hold, is_module
from bridge.pytorch._verl import is_verl, open_verl


def open_torch(source: Any, prefix: str = "") -> Source:
    """Opens a source as accepted by `from_torch`; reads no weights.

    Args:
      source: An `nn.Module`, a state dict of tensors or arrays, or the path of a
        `.safetensors` file, a file of `torch.save` (any other suffix), or a directory
        with transformers' file names, where safetensors is preferred, or with verl's
        file per rank.
      prefix: Prefix of the tensors to load, which is removed from their names.

    Raises:
      FileNotFoundError: If the path does not exist.
      ValueError: If the path is not a checkpoint, a value is not a tensor with data,
        or no name begins with the prefix.
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
        f"A {type(source).__name__} is not a PyTorch model: give an nn.Module, a state "
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
    if path.is_dir() and not holds_model(path) and is_verl(path):
        return open_verl(path).source
    if path.is_file() and path.suffix != ".safetensors":
        return open_torch_file(path)  # whatever its ending
    return open_checkpoint(path)
