"""Binds every byte of a data file to its place, without reading the values again.

A data file of OCDBT holds chunks of values, each followed by its CRC-32C, and the tree
that says where each chunk is. A digest of all but the values therefore covers which
chunk stands where and what its checksum is: a chunk moved with its checksum, or a file
of another step, has another digest. A digest of the whole file would read back all that
was just written, and make a save a third slower (measured).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorstore as ts

Span = tuple[int, int]
"""Start and stop of bytes in a file."""

_PLACE = re.compile(r"(?:value|btreenode):([^:]*):(.*):(\d+):(\d+)")
_CHUNK = re.compile(r".*/c(/\d+)*")
_CRC_BYTES = 4
_ENTRY = struct.Struct("<QQ")  # offset and length of a chunk in its shard
_ABSENT = 2**64 - 1
# Shorter shards are hashed as a whole: that is faster than to read around them.
_SHORTEST_BYTES = 8192
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
    with contextlib.ExitStack() as stack:
        files: dict[str, int] = {}
        for key, place in _entries(base).items():
            if place is None or not _CHUNK.fullmatch(key):
                continue
            name, offset, length = place
            if length < _SHORTEST_BYTES:
                continue
            if name not in files:
                opened = stack.enter_context((database / name).open("rb", buffering=0))
                files[name] = opened.fileno()
            for start, stop in _spans(files[name], offset, length):
                yield name, (start, stop)


def _spans(file: int, offset: int, length: int) -> Iterator[Span]:
    """Yields the spans of a shard's values.

    Its index is the last of its bytes: an entry for each chunk, and a checksum. Only
    process 0 writes how many chunks there are, so their sizes tell it: with the index
    they are all of the shard, which the last few of them alone are not.
    """
    end = length - _CRC_BYTES
    for count in itertools.count(1):
        begin = end - count * _ENTRY.size
        if begin < 0:
            raise ValueError(f"a shard of {length} bytes without an index")
        index = os.pread(file, end - begin, offset + begin)
        found = [pair for pair in _ENTRY.iter_unpack(index) if pair[0] != _ABSENT]
        if sum(size for _, size in found) == begin:
            for start, size in found:
                yield offset + start, offset + start + size - _CRC_BYTES
            return


def _entries(base: ts.KvStore) -> dict[str, Any]:
    """Returns the newest version's keys: place as (file, offset, length).

    None for a short value, which is in the tree itself.
    """
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
            entries[key] = None if inline else _place(entry["indirect_value"])
    return entries


def _place(text: str) -> tuple[str, int, int]:
    found = _PLACE.fullmatch(text)
    assert found is not None, text
    folder, name, offset, length = found.groups()
    return folder + name, int(offset), int(length)
