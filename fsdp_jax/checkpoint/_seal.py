"""Binds every byte of a data file to its place, without reading the values again.

A data file of OCDBT holds chunks of values, each followed by its CRC-32C, and the tree
that says where each chunk is. A digest of all but the values therefore covers which
chunk stands where and what its checksum is: a chunk moved with its checksum, or a file
of another step, has another digest. A digest of the whole file would read back all that
was just written, and make a save a third slower (measured).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tensorstore as ts

Span = tuple[int, int]
"""Start and stop of bytes in a file."""

_PLACE = re.compile(r"(?:value|btreenode):([^:]*):(.*):(\d+):(\d+)")
_CHUNK = re.compile(r"(.*)/c(?:/\d+)*")
_CRC_BYTES = 4
_ENTRY = struct.Struct("<QQ")  # offset and length of a chunk in its shard
_ABSENT = 2**64 - 1
# Shorter values are hashed too: that is faster than to read around them.
_SHORTEST_BYTES = 1024
_READ_BYTES = 2**20


@dataclasses.dataclass(frozen=True)
class Seal:
    """What a data file must be.

    Attributes:
      size: Size in bytes.
      sha256: Digest in hex of all bytes outside of `values`.
      values: Spans with values, ascending; each is followed by its checksum.
    """

    size: int
    sha256: str
    values: tuple[Span, ...] = ()


def seal_files(database: Path) -> dict[str, Seal]:
    """Returns the seals of an OCDBT database's data files, by path in its folder."""
    values: dict[str, list[Span]] = {}
    for name, span in _value_spans(database):
        values.setdefault(name, []).append(span)
    names = [f"d/{path.name}" for path in (database / "d").glob("*")]
    return {
        name: seal(database / name, tuple(sorted(values.get(name, ()))))
        for name in sorted(names)
    }


def seal(path: Path, values: tuple[Span, ...] = ()) -> Seal:
    """Returns the seal of a file.

    Args:
      path: Regular file.
      values: Spans with values, ascending and apart.
    """
    digest, size = hashlib.sha256(), path.stat().st_size
    starts = [0, *(stop for _, stop in values)]
    stops = [*(start for start, _ in values), size]
    with path.open("rb", buffering=0) as file:
        for start, stop in zip(starts, stops, strict=True):
            for at in range(start, stop, _READ_BYTES):
                part = min(_READ_BYTES, stop - at)
                digest.update(os.pread(file.fileno(), part, at))
    return Seal(size, digest.hexdigest(), values)


def _value_spans(database: Path) -> Iterator[tuple[str, Span]]:
    """Yields each data file with a span of values that a checksum follows."""
    base = ts.KvStore.open({"driver": "file", "path": f"{database}/"}).result()
    entries = _entries(base)
    files: dict[str, Any] = {}
    chunks = _chunks_a_shard(base, entries)
    try:
        for key, place in entries.items():
            found = _CHUNK.fullmatch(key)
            if found is None or isinstance(place, bytes):
                continue
            name, offset, length = place
            if name not in files:
                files[name] = (database / name).open("rb", buffering=0)
            count = chunks[found[1]]
            for start, stop in _spans(files[name], offset, length, count):
                yield name, (start, stop)
    finally:
        for file in files.values():
            file.close()


def _spans(file: Any, offset: int, length: int, count: int) -> Iterator[Span]:
    """Yields the spans of a shard's values: its index is the last of its bytes."""
    num_bytes = count * _ENTRY.size
    end = offset + length - _CRC_BYTES
    index = _ENTRY.pack(0, length - _CRC_BYTES - num_bytes)
    if count > 1:
        index = os.pread(file.fileno(), num_bytes, end - num_bytes)
    for start, size in _ENTRY.iter_unpack(index):
        if start != _ABSENT and size - _CRC_BYTES >= _SHORTEST_BYTES:
            yield offset + start, offset + start + size - _CRC_BYTES


def _entries(base: ts.KvStore) -> dict[str, Any]:
    """Returns the newest version's keys: place as (file, offset, length), or bytes."""
    versions = ts.ocdbt.dump(base).result()["versions"]
    root = versions[-1]["root"].get("location") if versions else None
    entries: dict[str, Any] = {}
    nodes = [] if root is None else [("", root)]
    while nodes:
        prefix, node = nodes.pop()
        for entry in ts.ocdbt.dump(base, node).result()["entries"]:
            if "location" in entry:
                inside = entry.get("subtree_common_prefix", b"").decode()
                nodes.append((prefix + inside, entry["location"]))
                continue
            key = prefix + entry["key"].decode()
            inline = "inline_value" in entry
            entries[key] = (
                entry["inline_value"] if inline else _place(entry["indirect_value"])
            )
    return entries


def _place(text: str) -> tuple[str, int, int]:
    found = _PLACE.fullmatch(text)
    assert found is not None, text
    folder, name, offset, length = found.groups()
    return folder + name, int(offset), int(length)


def _chunks_a_shard(base: ts.KvStore, entries: Mapping[str, Any]) -> dict[str, int]:
    """Returns the number of chunks in each shard of every array."""
    counts = {}
    for key, value in entries.items():
        name, slash, last = key.rpartition("/")
        if not slash or last != "zarr.json":
            continue
        if not isinstance(value, bytes):
            place = ":".join(map(str, value))
            value = ts.ocdbt.dump(base, f"value::{place}").result()
        counts[name] = _num_chunks(json.loads(value))
    return counts


def _num_chunks(zarr: dict[str, Any]) -> int:
    outer = zarr["chunk_grid"]["configuration"]["chunk_shape"]
    inner = zarr["codecs"][0]["configuration"]["chunk_shape"]
    return math.prod(a // b for a, b in zip(outer, inner, strict=True))
