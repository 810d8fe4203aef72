"""File format of one process's shards, with a checksum for each.

The bytes of the file are those sent to peers: a copy is the same file elsewhere. Orbax
is not used, since each step of each host would be a checkpoint of its own. Here a file
is as long as its shards and its header, and is read without a copy.

    magic, lengths, CRC-32 of | header as JSON, CRC-32 of each shard | shards
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import struct
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import UInt8

from fsdp_jax._box import Box, shape_of
from fsdp_jax.checkpoint._leaf_names import Leaf
from fsdp_jax.checkpoint._manifest import MISREAD, DamagedCheckpointError
from fsdp_jax.checkpoint.local._layout import (
    Layout,
    layout_from_json,
    logical_box,
)

Bytes = UInt8[np.ndarray, "bytes"]

_MAGIC = b"fsdpjax2"
_PREFIX = struct.Struct("<8sQQI")  # magic, header bytes, number of shards, CRC-32
_COPIES_AT_ONCE = 4
SUFFIX = ".shards"


@dataclasses.dataclass(frozen=True)
class Header:
    """Header of a file.

    Attributes:
      process: Process that saved the shards. All fields but this and `own` are equal in
        every file of the save.
      folder: Name of the folder of the save, which has its step and attempt.
      layout: Shards of each process.
      about: Further values of the save, in JSON types.
      own: Further values of this process alone.
    """

    process: int
    folder: str
    layout: Layout
    about: dict[str, Any]
    own: dict[str, Any] = dataclasses.field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Returns the header in JSON types; inverse of `header_from_json`."""
        return vars(self) | {"layout": self.layout.as_json()}


def header_from_json(value: dict[str, Any]) -> Header:
    """Returns the header from JSON types; inverse of `Header.as_json`."""
    layout = layout_from_json(value["layout"])
    process, folder = value["process"], value["folder"]
    return Header(process, folder, layout, value["about"], value["own"])


@dataclasses.dataclass(frozen=True)
class ShardFile:
    """Shards of one process, in memory or memory-mapped.

    Attributes:
      name: Name of the file in messages.
      header: Header, verified by its checksum.
      checksums: CRC-32 of each shard.
      values: Bytes of all shards.
    """

    name: str
    header: Header
    checksums: tuple[int, ...]
    values: Bytes

    def check(self) -> None:
        """Reads every byte and verifies the checksums.

        Raises:
          DamagedCheckpointError: If shards are not as they were written; lists all of
            them.
        """
        wrong = [
            f"{name}{list(map(list, box))}"
            for (name, box, data), checksum in zip(
                self._shards(), self.checksums, strict=True
            )
            if zlib.crc32(data.data) != checksum
        ]
        if wrong:
            raise _damaged(self.name, f"{len(wrong)} shard(s): {', '.join(wrong)}")

    def read(self) -> dict[tuple[str, Box], np.ndarray]:
        """Returns each shard by leaf and box, not verified; see `check`."""
        return {
            (name, box): data.view(self.header.layout.leaves[name].dtype).reshape(
                shape_of(box)
            )
            for name, box, data in self._shards()
        }

    def _shards(self) -> Iterator[tuple[str, Box, Bytes]]:
        start = 0
        for name, box in self.header.layout.shards(self.header.process):
            stop = start + self.header.layout.num_bytes(name, box)
            yield name, box, self.values[start:stop]
            start = stop


def pack(header: Header, leaves: Mapping[str, Leaf]) -> Bytes:
    """Copies the shards of this process to the host, each replica once.

    The state may be donated as soon as this returns.
    """
    shards = header.layout.shards(header.process)
    sizes = [header.layout.num_bytes(name, box) for name, box in shards]
    text = json.dumps(header.as_json()).encode()
    start = _PREFIX.size + len(text) + 4 * len(shards)
    packed = np.empty(start + sum(sizes), np.uint8)
    ends = list(itertools.accumulate(sizes, initial=start))
    places = [packed[a:b] for a, b in itertools.pairwise(ends)]
    sources = _sources(leaves)
    with ThreadPoolExecutor(_COPIES_AT_ONCE) as pool:
        found = (sources[shard] for shard in shards)
        checksums = np.array(list(pool.map(_copy, found, places)), "<u4")
    body = text + checksums.tobytes()
    prefix = _PREFIX.pack(_MAGIC, len(text), len(shards), zlib.crc32(body))
    packed[:start] = np.frombuffer(prefix + body, np.uint8)
    return packed


def file_name(writer: int) -> str:
    """Returns the name of the file with the shards of a process."""
    return f"{writer}{SUFFIX}"


def open_file(path: Path) -> ShardFile:
    """Memory-maps a file.

    Raises:
      DamagedCheckpointError: If its header is not as it was written, the file has
        another length than the header says, or it is that of another save or process.
    """
    if path.is_symlink() or not path.is_file():  # opening a pipe would wait
        raise _damaged(str(path), "a link, or no regular file")
    try:
        return parse(str(path), np.memmap(path, np.uint8, "r"), path)
    except (OSError, ValueError) as error:
        if isinstance(error, DamagedCheckpointError):
            raise
        raise _damaged(str(path), str(error)) from error


def parse(name: str, content: Bytes, path: Path) -> ShardFile:
    """Parses the content of a file.

    Args:
      name: Name of the file in messages.
      content: All bytes of the file.
      path: Place of the file, which says its save and its process.

    Raises:
      DamagedCheckpointError: If header, length or place are wrong, as for `open_file`.
    """
    if len(content) < _PREFIX.size:
        raise _damaged(name, "its header is cut off")
    magic, text, shards, checksum = _PREFIX.unpack(content[: _PREFIX.size].tobytes())
    start = _PREFIX.size + text + 4 * shards
    body = content[_PREFIX.size : start].tobytes()
    if magic != _MAGIC or zlib.crc32(body) != checksum:
        raise _damaged(name, "its header")
    try:
        header = header_from_json(json.loads(body[:text]))
        place = f"{header.folder}/{file_name(header.process)}"
        layout = header.layout
        sizes = [layout.num_bytes(*shard) for shard in layout.shards(header.process)]
    except MISREAD as error:
        raise _damaged(name, f"its header: {error!r:.80}") from error
    if place != f"{path.parent.name}/{path.name}":
        raise _damaged(name, f"it is '{place}'")
    if len(content) != start + sum(sizes):
        raise _damaged(name, f"{len(content)} bytes, not {start + sum(sizes)}")
    checksums = np.frombuffer(body[text:], "<u4").tolist()
    return ShardFile(name, header, tuple(checksums), content[start:])


def _damaged(name: str, what: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(f"'{name}' is not as it was written: {what}.")


def _sources(leaves: Mapping[str, Leaf]) -> dict[tuple[str, Box], Any]:
    """Returns the local shards of the arrays; starts their copies to the host."""
    sources: dict[tuple[str, Box], Any] = {}
    for name, leaf in leaves.items():
        shape, logical = tuple(leaf.value.shape), tuple(leaf.shape)
        if not isinstance(leaf.value, jax.Array):
            whole = tuple(slice(None) for _ in shape)
            sources[name, logical_box(whole, shape, logical)] = leaf.value
            continue
        for shard in leaf.value.addressable_shards:
            key = name, logical_box(shard.index, shape, logical)
            if key not in sources:
                sources[key] = shard.data
                # Start all copies before waiting for the first one.
                shard.data.copy_to_host_async()
    return {
        (name, box): (value, tuple(slice(stop - start) for start, stop in box))
        for (name, box), value in sources.items()
    }


def _copy(source: tuple[Any, tuple[slice, ...]], place: Bytes) -> int:
    """Copies a shard without its padding, and returns its checksum."""
    value, inside = source
    part = np.ascontiguousarray(np.asarray(value)[inside])
    place[:] = part.reshape(-1).view(np.uint8)
    return zlib.crc32(place.data)
