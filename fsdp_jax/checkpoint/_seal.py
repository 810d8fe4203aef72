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
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorstore as ts

from fsdp_jax.checkpoint._paths import Ranges, files_in, kvstore_spec, open_ranges

Span = tuple[int, int]
"""Start and stop of bytes in a file."""

_PLACE = re.compile(r"(?:value|btreenode):([^:]*):(.*):(\d+):(\d+)")
_CHUNK = re.compile(r".*/c(/\d+)*")
_CRC_BYTES = 4
_ENTRY = struct.Struct("<QQ")  # offset and length of a chunk in its shard
_ABSENT = 2**64 - 1
# Shorter shards are hashed as a whole: that is faster than to read around them.
_SHORTEST_BYTES = 8192
# Read at first of a shard, for its index; most have a few chunks.
_INDEX_BYTES = 4096


@dataclasses.dataclass(frozen=True)
class Seal:
    """Size and digest that a data file must have.

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
    names = [name for name in files_in(database) if name.startswith("d/")]
    return {
        name: seal(database / name, tuple(sorted(values.get(name, ()))))
        for name in names
    }


def seal(path: Path, values: tuple[Span, ...] = ()) -> Seal:
    """Returns the seal of a file.

    Args:
      path: Regular file.
      values: Spans with values, ascending and apart.
    """
    digest, size = hashlib.sha256(), sum(stop - start for start, stop in values)
    starts = [0, *(stop for _, stop in values)]
    stops = [*(start for start, _ in values), None]
    with open_ranges(path) as ranges:
        for part in ranges.read_all(list(zip(starts, stops, strict=True))):
            digest.update(part)
            size += len(part)
    return Seal(size, digest.hexdigest(), values)


def _value_spans(database: Path) -> Iterator[tuple[str, Span]]:
    """Yields each data file with a span of values that a checksum follows."""
    base = ts.KvStore.open(kvstore_spec(database)).result()
    with contextlib.ExitStack() as stack:
        files: dict[str, Ranges] = {}
        for key, place in _entries(base).items():
            if place is None or not _CHUNK.fullmatch(key):
                continue
            name, offset, length = place
            if length < _SHORTEST_BYTES:
                continue
            if name not in files:
                files[name] = stack.enter_context(open_ranges(database / name))
            for start, stop in _spans(files[name], offset, length):
                yield name, (start, stop)


def _spans(file: Ranges, offset: int, length: int) -> Iterator[Span]:
    """Yields the spans of a shard's values.

    Its index is the last of its bytes: an entry for each chunk, and a checksum. Only
    process 0 writes how many chunks there are, so their sizes tell it: with the index
    they are all of the shard, which the last few of them alone are not.
    """
    known = min(length, _INDEX_BYTES)
    while True:
        tail = file.read(offset + length - known, offset + length)
        for count in range(1, (known - _CRC_BYTES) // _ENTRY.size + 1):
            begin = known - _CRC_BYTES - count * _ENTRY.size
            index = tail[begin : known - _CRC_BYTES]
            found = [pair for pair in _ENTRY.iter_unpack(index) if pair[0] != _ABSENT]
            if sum(size for _, size in found) == length - known + begin:
                for start, size in found:
                    yield offset + start, offset + start + size - _CRC_BYTES
                return
        if known == length:
            raise ValueError(f"a shard of {length} bytes without an index")
        known = min(length, 16 * known)


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
