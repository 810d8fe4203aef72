"""Reads the arrays of a step, each chunk once, into memory that devices can use.

Orbax reads a chunk once for each shard that needs a part of it, once in each process
that holds a replica, and into memory that XLA:CPU copies again.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore as ts
from jax.sharding import NamedSharding, PartitionSpec

from fsdp_jax._box import Box, box_of, cover, index_in, overlap, shape_of
from fsdp_jax.checkpoint._paths import time_limit
from fsdp_jax.checkpoint._zarr import (
    Arrays,
    arrays_of_step,
    check_arrays,
    chunks_of,
    open_arrays,
)

# Reads of one chunk each, of at most 32 MiB, which bounds the extra memory of a load.
_READS_AT_ONCE = 16
# Alignment of host memory that XLA:CPU uses without a copy.
_ALIGNMENT_BYTES = 64


def read_arrays(
    directory: Path,
    wanted: dict[str, jax.ShapeDtypeStruct],
    leaves: Mapping[str, jax.ShapeDtypeStruct],
    max_bytes: int,
    where: Arrays | None = None,
) -> dict[str, jax.Array]:
    """Reads arrays, truncated or padded with zeros to the shapes of `wanted`.

    Each process reads an even part of what several processes hold: the arrays are then
    split finer than in `wanted`, until `reshard`.

    Args:
      directory: State directory of a step, see `state_directory`.
      wanted: Abstract arrays with shardings, by name.
      leaves: Stored shapes and dtypes, as for `check_arrays`.
      max_bytes: Limit of a chunk, as for `check_arrays`.
      where: Where the arrays are; None for those of a step of fsdp_jax.

    Raises:
      Exception: TensorStore's error if a checksum does not match; see `root_cause`.
    """
    arrays: dict[str, jax.Array] = {}
    under_way: deque[Callable[[], None]] = deque()
    opened = open_arrays(where or arrays_of_step(directory), list(wanted))
    check_arrays(opened, leaves, max_bytes)
    for name, array in opened.items():
        leaf = _Leaf.of(wanted[name], array, time_limit(directory))
        for chunk in chunks_of(array):
            if len(under_way) >= _READS_AT_ONCE:
                under_way.popleft()()
            under_way.append(leaf.start(chunk))
        under_way.append(lambda n=name, x=leaf: arrays.update({n: x.finish()}))
    while under_way:
        under_way.popleft()()
    return arrays


def reshard(
    arrays: dict[str, jax.Array], wanted: dict[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    """Reshards arrays that were read in finer parts to the shardings of `wanted`.

    Every process must call this, with the same names in the same order. The parts of
    one array are deleted before the next is exchanged, so that those of one array at a
    time are held twice.
    """
    exchanged = dict(arrays)
    for name, x in arrays.items():
        sharding = wanted[name].sharding
        if x.sharding != sharding:
            exchanged[name] = jax.block_until_ready(_to_sharding(sharding)(x))
            if not x.sharding.is_equivalent_to(sharding, x.ndim):
                x.delete()
    return exchanged


@functools.cache
def _to_sharding(sharding: jax.sharding.Sharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda x: x, out_shardings=sharding)


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """An array that is being read.

    Attributes:
      abstract: Abstract array, with the sharding in which it is read.
      array: Stored array.
      memory: Shards of this process in the stored dtype, by box.
      limit_secs: Time for one read; None for no limit.
    """

    abstract: jax.ShapeDtypeStruct
    array: ts.TensorStore
    memory: dict[Box, np.ndarray]
    limit_secs: float | None

    @classmethod
    def of(
        cls,
        wanted: jax.ShapeDtypeStruct,
        array: ts.TensorStore,
        limit_secs: float | None,
    ) -> _Leaf:
        """Allocates memory for the shards that this process reads."""
        sharding = _disjoint(wanted)
        abstract = jax.ShapeDtypeStruct(wanted.shape, wanted.dtype, sharding=sharding)
        indices = sharding.addressable_devices_indices_map(wanted.shape).values()
        boxes = {box_of(index, wanted.shape) for index in indices}
        pairs = zip(array.shape, wanted.shape, strict=True)
        zeros = any(have < want for have, want in pairs)  # The rest is zero padding.
        dtype = array.dtype.numpy_dtype
        memory = {box: _take(box, dtype, zeros) for box in boxes}
        return cls(abstract, array, memory, limit_secs)

    def start(self, chunk: Box) -> Callable[[], None]:
        """Starts reading a chunk; returns a function that waits for it."""
        parts = [
            (part, memory[*index_in(part, box), ...])
            for box, memory in self.memory.items()
            if (part := overlap(chunk, box)) is not None
        ]
        if not parts:
            return lambda: None
        if len(parts) == 1:
            ((part, memory),) = parts
            # TensorStore keeps the origin of a slice, and `memory` begins at 0.
            stored = self.array[index_in(part)][ts.d[:].translate_to[0]]
            writing = ts.array(memory).write(stored)
            return functools.partial(writing.result, self.limit_secs)
        # Several shards need parts of the chunk: read the bounding box once.
        bounding = cover(part for part, _ in parts)
        reading = self.array[index_in(bounding)].read()

        def deal() -> None:
            values = np.asarray(reading.result(self.limit_secs))
            for part, memory in parts:
                memory[...] = values[index_in(part, bounding)]

        return deal

    def finish(self) -> jax.Array:
        """Makes a jax array of the shards; on a CPU without a copy."""
        dtype, shape = self.abstract.dtype, self.abstract.shape
        memory = {box: x.astype(dtype, copy=False) for box, x in self.memory.items()}
        return jax.make_array_from_callback(
            shape, self.abstract.sharding, lambda index: memory[box_of(index, shape)]
        )


def _disjoint(leaf: jax.ShapeDtypeStruct) -> Any:
    """Returns a sharding of the leaf in which processes share no part, if possible.

    It is possible if the mesh axes over which the leaf is replicated divide its dims.
    """
    sharding: Any = leaf.sharding
    if not isinstance(sharding, NamedSharding) or not _is_shared(sharding, leaf.shape):
        return sharding
    mesh, shape = sharding.mesh, list(sharding.shard_shape(leaf.shape))
    spec = [_axes(entry) for entry in sharding.spec]
    spec += [()] * (len(shape) - len(spec))
    for axis, size in mesh.shape.items():
        dims = [dim for dim, length in enumerate(shape) if length % size == 0]
        if dims and not any(axis in axes for axes in spec):
            spec[dims[0]] += (axis,)
            shape[dims[0]] //= size
    return NamedSharding(mesh, PartitionSpec(*spec), memory_kind=sharding.memory_kind)


def _is_shared(sharding: NamedSharding, shape: tuple[int, ...]) -> bool:
    """Returns whether several processes hold the same part."""
    owners: dict[Box, set[int]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        owners.setdefault(box_of(index, shape), set()).add(device.process_index)
    return any(len(processes) > 1 for processes in owners.values())


def _axes(entry: Any) -> tuple[str, ...]:
    """Returns the mesh axes of one entry of a PartitionSpec."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _take(box: Box, dtype: np.dtype, zeros: bool) -> np.ndarray:
    """Allocates memory aligned so that XLA:CPU uses it without a copy."""
    shape = shape_of(box)
    nbytes = math.prod(shape) * dtype.itemsize
    buffer = np.empty(nbytes + _ALIGNMENT_BYTES, np.uint8)
    if zeros:
        buffer.fill(0)
    start = -buffer.ctypes.data % _ALIGNMENT_BYTES
    return buffer[start : start + nbytes].view(dtype).reshape(shape)
