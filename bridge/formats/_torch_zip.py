"""Reader of files of `torch.save`, without torch: trees of lazy tensors.

A `.pt` or `.bin` file is a zip archive: a pickle, which is parsed as data, and one
member per storage, from which a tensor takes elements by offset and strides.

Source: pytorch torch/serialization.py::_save
"""

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bridge._local_path import check_local
from bridge.formats._other_formats import describe_content
from bridge.formats._source import Source
from bridge.formats._tensor_source import TensorSource
from bridge.formats._torch_tensors import LazyTensor, tensor_rules
from bridge.formats._unpickle import unpickle
from bridge.formats._zip import StoredZip

# More than any checkpoint has; shared references in a tiny pickle can expand to 2**60.
_MAX_VALUES = 2**20


def open_torch_file(path: str | os.PathLike[str]) -> Source:
    """Opens a file of `torch.save` as named tensors; reads only its pickle.

    The file may contain a state dict, or any nesting of dicts and lists, such as a
    training checkpoint: keys are then joined by dots. Values other than tensors are
    omitted; `read_torch_file` returns them.

    Args:
      path: Path of a `.pt`, `.pth` or `.bin` file, from torch 1.6 or newer.

    Returns:
      Lazy source of the tensors.

    Raises:
      FileNotFoundError: If there is no such file.
      ValueError: If it is not a torch file, is damaged, requires running code,
        contains no tensor, or two of its tensors would have the same name.
    """
    tensors = flatten_tensors(read_torch_file(path), f"'{path}'")
    if not tensors:
        raise ValueError(f"'{path}' holds 0 tensors: nothing can be taken from it.")
    return TensorSource(str(path), MappingProxyType(tensors))


def read_torch_file(path: str | os.PathLike[str]) -> Any:
    """Reads the tree saved by `torch.save`, with a `LazyTensor` for each tensor.

    Args:
      path: Path of a `.pt`, `.pth` or `.bin` file, from torch 1.6 or newer.

    Returns:
      Tree of dicts, lists, tuples, strings and numbers. Namespaces become dicts,
      dtypes numpy dtypes, and other objects inert `Stub`s.

    Raises:
      FileNotFoundError: If there is no such file.
      ValueError: If it is not a torch file, is damaged, or requires running code.
    """
    check_local(path)
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"No torch file at '{path}': no file is there.")
    _check_kind(path)
    return read_torch_archive(StoredZip(path))


def read_torch_archive(archive: StoredZip) -> Any:
    """Reads the tree of one archive; see `read_torch_file`."""
    pickles = [name for name in archive.names() if name.endswith("/data.pkl")]
    if len(pickles) != 1 or pickles[0].count("/") != 1:
        raise ValueError(
            f"{archive.name} was not written by torch.save: it has {len(pickles)} "
            "members '<name>/data.pkl', not one."
        )
    folder = pickles[0].removesuffix("data.pkl")
    if f"{folder}constants.pkl" in archive.names():
        raise ValueError(
            f"{archive.name} is a TorchScript program, not weights. Load it with "
            "torch.jit.load and save its state_dict()."
        )
    if f"{folder}byteorder" in archive.names():
        order = archive.read(f"{folder}byteorder").tobytes()
        if order != b"little":
            raise ValueError(f"{archive.name} has the byte order {order!r}, not little")
    program = archive.read(pickles[0]).tobytes()
    return unpickle(program, archive.name, tensor_rules(archive, folder))


def flatten_tensors(tree: Any, subject: str) -> dict[str, LazyTensor]:
    """Returns all tensors of a tree by dotted path.

    Raises:
      ValueError: If two tensors would have the same name, or the tree has more than
        2**20 values.
    """
    tensors: dict[str, LazyTensor] = {}
    values = itertools.islice(_walk(tree, ()), _MAX_VALUES + 1)
    for count, (path, value) in enumerate(values):
        if count == _MAX_VALUES:
            raise ValueError(f"{subject} holds more than {_MAX_VALUES:,} values.")
        if isinstance(value, LazyTensor):
            name = ".".join(path)
            if name in tensors:
                raise ValueError(f"{subject} holds two tensors named {name!r}.")
            tensors[name] = value
    return tensors


def _walk(tree: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields the path and value of every node of a tree, in order."""
    left = [(path, tree)]
    while left:
        path, tree = left.pop()
        yield path, tree
        if isinstance(tree, dict):
            inner = [((*path, str(key)), value) for key, value in tree.items()]
            left += reversed(inner)
        elif isinstance(tree, (list, tuple)):
            inner = [((*path, str(n)), value) for n, value in enumerate(tree)]
            left += reversed(inner)


def _check_kind(path: Path) -> None:
    with path.open("rb") as stream:
        head = stream.read(64)
    start = head[:4]
    if start[:2] == b"\x80\x02":
        raise ValueError(
            f"'{path}' is a bare pickle, as torch wrote before 1.6. Load it with a "
            "torch of today and save it again: "
            "torch.save(torch.load(path, weights_only=True), new_path)."
        )
    if start != b"PK\3\4":
        raise ValueError(
            f"'{path}' was not written by torch.save: it begins with {start!r}, a zip "
            f"archive with b'PK\\x03\\x04'. {describe_content(head)}".rstrip()
        )
