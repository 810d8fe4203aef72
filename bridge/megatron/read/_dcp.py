"""Distributed checkpoints (DCP): chunked tensors as torch writes them.

A directory holds `.metadata`, a pickle that maps each chunk (a box of a tensor) to a
byte range of a file, and the files, which are concatenated torch archives. Megatron's
`torch_dist` and `fsdp_dtensor` use this layout, as do plain torch checkpoints.

Source: pytorch torch/distributed/checkpoint/metadata.py::Metadata,
torch/distributed/checkpoint/filesystem.py::_StorageInfo
"""

import dataclasses
import functools
import math
import reprlib
import threading
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

import numpy as np

from bridge._box import Box, Range, shape_of
from bridge.formats._torch_tensors import PLAIN_RULES, LazyTensor
from bridge.formats._torch_zip import read_torch_archive
from bridge.formats._unpickle import Rule, Stub, unpickle
from bridge.formats._zip import StoredZip
from bridge.megatron._tiling import Tile
from bridge.megatron._views import Assembled

METADATA_NAME = ".metadata"

StatePath = tuple[str | int, ...]
"""Keys, and indices of lists, that lead to an entry in a nested state dict."""

# An archive that was closed is verified again when reopened. Many stay open because
# each layer's `linear_qkv` is read for three leaves.
_MAX_OPEN_ARCHIVES = 4096


@dataclasses.dataclass(frozen=True)
class DcpDirectory:
    """Contents of a distributed checkpoint.

    Args:
      path: Directory of the checkpoint.
      tensors: Lazy tensors by key on disk.
      items: Functions that read the non-tensor objects, by key on disk.
      raw: Functions that read the archives of these objects as bytes.
      paths: Keys that lead to an entry in the nested state dict that was saved, by its
        key on disk; empty if it was flat.
    """

    path: Path
    tensors: Mapping[str, Assembled]
    items: Mapping[str, Callable[[], Any]]
    raw: Mapping[str, Callable[[], bytes]]
    paths: Mapping[str, StatePath]


def open_dcp(path: Path) -> DcpDirectory:
    """Opens a distributed checkpoint; reads and validates only `.metadata`.

    Args:
      path: Directory that contains `.metadata`.

    Raises:
      ValueError: If `.metadata` is damaged or would execute code, if chunks do not fill
        their tensor, or if files are absent, too short, compressed or outside of the
        directory. All errors in tensors and files are listed.
    """
    subject = f"'{path / METADATA_NAME}'"
    program = (path / METADATA_NAME).read_bytes()
    metadata = unpickle(program, subject, {**PLAIN_RULES, **_RULES})
    if not isinstance(metadata, _Metadata):
        raise ValueError(
            f"{subject} holds a {type(metadata).__name__}, not the metadata of a "
            "distributed checkpoint."
        )
    wrong = _misplaced(path, metadata.places)
    opened = _opener()
    tensors = {}
    for key, entry in metadata.entries.items():
        if isinstance(entry, _TensorEntry):
            try:
                tensors[key] = _assemble(path, key, entry, metadata.places, opened)
                tensors[key].check()
            except ValueError as error:
                wrong.append(f"  {key}: {error}")
        elif (key, None) not in metadata.places:
            wrong.append(f"  {key}: no file is said to hold it")
    if wrong:
        raise ValueError(f"{subject} does not fit its files:\n" + "\n".join(wrong))
    places = {
        key: metadata.places[key, None]
        for key, entry in metadata.entries.items()
        if not isinstance(entry, _TensorEntry)
    }
    return DcpDirectory(
        path,
        MappingProxyType(tensors),
        {key: functools.partial(_read_item, path, key, p) for key, p in places.items()},
        {key: functools.partial(_read_raw, path, p) for key, p in places.items()},
        MappingProxyType(metadata.paths),
    )


@dataclasses.dataclass(frozen=True)
class _Place:
    file: str
    offset: int
    nbytes: int
    transforms: Any


@dataclasses.dataclass(frozen=True)
class _TensorEntry:
    shape: tuple[int, ...]
    dtype: np.dtype
    chunks: tuple[Box, ...]


@dataclasses.dataclass(frozen=True)
class _Metadata:
    entries: Mapping[str, _TensorEntry | None]
    places: Mapping[tuple[str, tuple[int, ...] | None], _Place]
    paths: dict[str, StatePath]


@dataclasses.dataclass(frozen=True)
class _Chunk:
    """Chunk of a tensor, whose archive is opened when it is first read."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    open: Callable[[], StoredZip]

    def read(self, slices: tuple[slice, ...] = ()) -> np.ndarray:
        archive = self.open()
        tensor = read_torch_archive(archive)
        if not isinstance(tensor, LazyTensor) or (
            (tensor.shape, tensor.dtype) != (self.shape, self.dtype)
        ):
            raise ValueError(
                f"{archive.name} should hold {self.dtype} {self.shape} for "
                f"'{self.name}', but holds {tensor}: the files are not of one save."
            )
        return tensor.read(slices)


def _assemble(
    path: Path, key: str, entry: _TensorEntry, places: Mapping, opened: Callable
) -> Assembled:
    tiles = []
    for box in entry.chunks:
        if 0 in shape_of(box):  # empty shard of an uneven split
            continue
        place = places.get((key, tuple(r.start for r in box)))
        if place is None:
            raise ValueError(f"no file is said to hold its chunk at {box}")
        nbytes = math.prod(shape_of(box)) * entry.dtype.itemsize
        if nbytes > place.nbytes:
            raise ValueError(
                f"its chunk at {box} has {nbytes:,} bytes, but {place.nbytes:,} in "
                f"'{place.file}'"
            )
        archive = functools.partial(
            opened, path / place.file, place.offset, place.nbytes
        )
        tiles.append(Tile(box, _Chunk(key, shape_of(box), entry.dtype, archive)))
    return Assembled(entry.shape, entry.dtype, tuple(tiles))


def _opener() -> Callable[[Path, int, int], StoredZip]:
    """Returns a thread-safe, caching function that opens archives."""
    cached = functools.lru_cache(_MAX_OPEN_ARCHIVES)(StoredZip)
    lock = threading.Lock()

    def opened(file: Path, offset: int, nbytes: int) -> StoredZip:
        with lock:
            return cached(file, offset, nbytes)

    return opened


def _read_item(path: Path, key: str, place: _Place) -> Any:
    value = read_torch_archive(StoredZip(path / place.file, place.offset, place.nbytes))
    # Megatron shards objects too; each shard is a list with one element.
    return value[0] if "/shard_" in key else value


def _read_raw(path: Path, place: _Place) -> bytes:
    with (path / place.file).open("rb") as stream:
        stream.seek(place.offset)
        return stream.read(place.nbytes)


def _misplaced(path: Path, places: Mapping[Any, _Place]) -> list[str]:
    # The metadata is untrusted: no file name in it may point outside the directory.
    names = {place.file for place in places.values()}
    outside = {
        name
        for name in names
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts
    }
    sizes = {
        name: (path / name).stat().st_size
        for name in names - outside
        if (path / name).is_file()
    }
    wrong = [f"  '{name}': outside of the directory" for name in sorted(outside)]
    wrong += [
        f"  '{name}': absent" for name in sorted(names - outside) if name not in sizes
    ]
    for (key, _), place in places.items():
        stop = place.offset + place.nbytes
        if place.file in sizes and not 0 <= place.offset < stop <= sizes[place.file]:
            wrong.append(
                f"  {key}: bytes {place.offset:,} to {stop:,} of '{place.file}', which "
                f"has {sizes[place.file]:,}"
            )
        if place.transforms:
            wrong.append(f"  {key}: compressed ({place.transforms}); save without")
    return wrong


def _metadata(stub: Stub) -> _Metadata:
    entries, places = stub.state["state_dict_metadata"], stub.state["storage_data"]
    if not all(isinstance(key, str) for key in entries):
        raise ValueError("a key is not a string")
    if not all(isinstance(place, _Place) for place in places.values()):
        raise ValueError("a place is none")
    return _Metadata(entries, places, _paths(stub.state.get("planner_data")))


def _paths(planner_data: Any) -> dict[str, StatePath]:
    """Returns the paths of torch's planner; data of others is not read."""
    if not isinstance(planner_data, dict):
        return {}
    return {
        key: path
        for key, path in planner_data.items()
        if isinstance(path, tuple) and all(type(part) in (str, int) for part in path)
    }


def _tensor_entry(stub: Stub) -> _TensorEntry:
    dtype = stub.state["properties"].state[0]
    shape, chunks = _sizes(stub.state["size"]), tuple(stub.state["chunks"])
    if not isinstance(dtype, np.dtype):
        raise ValueError(f"the dtype {reprlib.repr(dtype)} is not known")
    if any(len(box) != len(shape) for box in chunks):
        raise ValueError(f"chunks of a tensor of shape {shape} have other dims")
    return _TensorEntry(shape, dtype, chunks)


def _box(stub: Stub) -> Box:
    offsets, sizes = _sizes(stub.state["offsets"]), _sizes(stub.state["sizes"])
    return tuple(Range(o, o + n) for o, n in zip(offsets, sizes, strict=True))


def _sizes(value: Any) -> tuple[int, ...]:
    if not all(isinstance(n, int) and n >= 0 for n in value):
        raise ValueError(f"{reprlib.repr(value)} are not sizes")
    return tuple(value)


def _place(stub: Stub) -> _Place:
    state = stub.state
    file, span = state["relative_path"], (state["offset"], state["length"])
    if not isinstance(file, str) or not all(isinstance(n, int) for n in span):
        raise ValueError(f"{reprlib.repr(state)} is not a place in a file")
    return _Place(file, *span, state.get("transform_descriptors"))


_DCP = "torch.distributed.checkpoint"
_RULES: dict[str, Rule] = {
    f"{_DCP}.metadata.Metadata": _metadata,
    # Megatron-Core before 0.15 has its own class, which begins with the same fields.
    "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata": _metadata,
    f"{_DCP}.metadata.TensorStorageMetadata": _tensor_entry,
    f"{_DCP}.metadata.BytesStorageMetadata": lambda stub: None,
    f"{_DCP}.metadata.ChunkStorageMetadata": _box,
    # Drop `index`, which is only a hint: torch compares the other two fields.
    f"{_DCP}.metadata.MetadataIndex": lambda stub: (
        stub.state["fqn"],
        stub.state.get("offset"),
    ),
    f"{_DCP}.filesystem._StorageInfo": _place,
}
