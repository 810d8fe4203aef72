"""Access to the zarr arrays of a step through TensorStore."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import tensorstore as ts

from fsdp_jax._box import Box
from fsdp_jax.checkpoint._paths import kvstore_spec, time_limit
from fsdp_jax.checkpoint._store_path import StorePath

_METADATA = "/zarr.json"
# Reads of one chunk each, which bounds the memory of a pass over a step.
_READS_AT_ONCE = 16
# Copies of one chunk each; each holds the bytes read and those to write.
_COPIES_AT_ONCE = 4
_PLACES_BYTES = 100_000_000
# Small values that lie side by side are one request.
_COALESCED = {
    "experimental_read_coalescing_threshold_bytes": 2**20,
    "experimental_read_coalescing_merged_bytes": 32 * 2**20,
    "experimental_read_coalescing_interval": "1ms",
}


def zarr_metadata(directory: Path) -> dict[str, dict[str, Any]]:
    """Returns the `zarr.json` of every array under `directory`, by leaf name."""
    store = ts.KvStore.open(_ocdbt(directory)).result()
    keys = [key.decode() for key in store.list().result()]
    reads = {key: store.read(key) for key in keys if key.endswith(_METADATA)}
    return {
        key.removesuffix(_METADATA): json.loads(read.result().value)
        for key, read in reads.items()
    }


def is_dtype_stored(name: str) -> bool:
    """Returns whether TensorStore supports a dtype; it lacks uint2, uint4 and more."""
    try:
        ts.dtype(name)
    except (TypeError, ValueError):
        return False
    return True


def crop(directory: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Sets arrays that were written padded to their logical shapes, without copying.

    The padding stays in the file, where zarr readers do not see it.
    """
    context = ts.Context()
    for name, metadata in zarr_metadata(directory).items():
        shape = shapes.get(name)
        if shape is None or shape == tuple(metadata["shape"]):
            continue
        spec = {"driver": "zarr3", "kvstore": _ocdbt(directory) | {"path": f"{name}/"}}
        array = ts.open(spec, context=context).result()
        array.resize(exclusive_max=shape, resize_metadata_only=True).result()


def copy_arrays(source: Path, target: Path, names: Collection[str]) -> None:
    """Copies stored arrays with their checksums from `source` to a new folder."""
    have = ts.KvStore.open(_ocdbt(source)).result()
    copy = ts.KvStore.open(_ocdbt(target)).result()
    keys = [key for key in have.list().result() if _array_of(key.decode()) in names]
    for start in range(0, len(keys), _COPIES_AT_ONCE):
        batch = keys[start : start + _COPIES_AT_ONCE]
        reads = [have.read(key) for key in batch]
        values = [read.result().value for read in reads]
        writes = [copy.write(*pair) for pair in zip(batch, values, strict=True)]
        for write in writes:
            write.result()


def read_all(
    directory: Path, leaves: Mapping[str, jax.ShapeDtypeStruct], max_bytes: int
) -> None:
    """Reads every chunk of every array, which verifies all checksums.

    Args:
      directory: State directory of the step.
      leaves: Shape and dtype of each array, as for `check_arrays`.
      max_bytes: Limit of a chunk, as for `check_arrays`.

    Raises:
      Exception: TensorStore's error if a checksum does not match; see `root_cause`.
    """
    under_way: deque[ts.Future] = deque()
    limit_secs = time_limit(directory)
    arrays = open_arrays(arrays_of_step(directory), list(leaves))
    check_arrays(arrays, leaves, max_bytes)
    for array in arrays.values():
        for chunk in chunks_of(array):
            under_way.append(array[(*(slice(*bounds) for bounds in chunk), ...)].read())
            if len(under_way) == _READS_AT_ONCE:
                under_way.popleft().result(limit_secs)
    for read in under_way:
        read.result(limit_secs)


@dataclasses.dataclass(frozen=True)
class Arrays:
    """Arrays in a key-value store.

    Attributes:
      kvstore: TensorStore's spec of the key-value store.
      driver: TensorStore's name of their format.
      keys: Key of an array in the store, by name; a name that is not in it is the key.
    """

    kvstore: dict[str, Any]
    driver: str = "zarr3"
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)


def arrays_of_step(directory: Path) -> Arrays:
    """Returns where the arrays of a step are."""
    return Arrays(_ocdbt(directory))


def open_arrays(arrays: Arrays, names: Collection[str]) -> dict[str, ts.TensorStore]:
    """Opens arrays for reading, by name."""
    # Cache the OCDBT index, which would otherwise be read for each value.
    context = ts.Context({"cache_pool#places": {"total_bytes_limit": _PLACES_BYTES}})
    kvstore = arrays.kvstore
    if kvstore["driver"] == "ocdbt":
        kvstore = kvstore | {"cache_pool": "cache_pool#places"}
    opening = {
        name: ts.open(
            {
                "driver": arrays.driver,
                "kvstore": _within(kvstore, arrays.keys.get(name, name)),
            },
            context=context,
            open=True,
        )
        for name in names
    }
    return {name: array.result() for name, array in opening.items()}


def check_arrays(
    arrays: Mapping[str, ts.TensorStore],
    leaves: Mapping[str, jax.ShapeDtypeStruct],
    max_bytes: int,
) -> None:
    """Raises a `ValueError` unless arrays are as the manifest says, before a read.

    Args:
      arrays: Opened arrays, by name.
      leaves: Shape and dtype of each.
      max_bytes: Limit of a chunk, for which memory is allocated.
    """
    problems = []
    for name, array in arrays.items():
        leaf, chunk = leaves[name], array.chunk_layout.read_chunk.shape or ()
        num_bytes = (
            math.prod(size or 1 for size in chunk) * array.dtype.numpy_dtype.itemsize
        )
        have = tuple(array.shape), array.dtype.numpy_dtype
        if have != (leaf.shape, leaf.dtype):
            problems.append(
                f"{name}: {have[1]}{list(have[0])} in the file, "
                f"{leaf.dtype}{list(leaf.shape)} in the manifest"
            )
        elif num_bytes > max_bytes:
            problems.append(f"{name}: chunks of {num_bytes:,} bytes")
    if problems:
        raise ValueError("; ".join(problems))


def chunks_of(array: ts.TensorStore) -> Iterator[Box]:
    """Yields the boxes of the array's stored chunks, which have one checksum each."""
    return chunk_grid(array.shape, array.chunk_layout.read_chunk_template.shape)


def root_cause(error: BaseException) -> str:
    """Returns TensorStore's message without the spec that it appends."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).partition(" [tensorstore_spec")[0]


def _array_of(key: str) -> str:
    """Returns the array name of a metadata or chunk key."""
    found = re.fullmatch(r"(.*)/(zarr\.json|c(/\d+)*)", key)
    return key if found is None else found[1]


def chunk_grid(shape: Sequence[int], sizes: Sequence[int]) -> Iterator[Box]:
    """Yields the boxes of size `sizes` that tile an array of shape `shape`."""
    starts = [range(0, total, size) for total, size in zip(shape, sizes, strict=True)]
    for corner in itertools.product(*starts):
        yield tuple(
            (start, min(start + size, total))
            for start, size, total in zip(corner, sizes, shape, strict=True)
        )


def _within(kvstore: dict[str, Any], key: str) -> dict[str, Any]:
    """Returns the spec of a folder in a key-value store."""
    return kvstore | {"path": f"{kvstore.get('path', '')}{key}/"}


def _ocdbt(directory: Path) -> dict[str, Any]:
    spec = {"driver": "ocdbt", "base": kvstore_spec(directory)}
    return spec | (_COALESCED if isinstance(directory, StorePath) else {})
