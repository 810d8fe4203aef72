"""Sends bytes between hosts by collectives, over the training network.

No port is opened, and only processes of the job can send or receive.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fsdp_jax.checkpoint.local._format import Bytes
from fsdp_jax.checkpoint.local._replication import Pair

Device = Any  # jax's device type is not visible to type checkers.

# Chunk of one transfer; a device and its host hold two at a time.
_CHUNK_BYTES = 32 * 2**20
_AXIS = "process"


def send(
    pairs: Sequence[Pair],
    content: Bytes | None,
    sizes: Mapping[int, int],
    timeout_secs: float,
) -> Bytes | None:
    """Sends each source's bytes to its destination; all processes call it alike.

    Call it on the main thread, so that it does not interleave with the collectives of
    the training step.

    Args:
      pairs: `(source, destination)` processes; each process at most once on either
        side.
      content: Bytes that this process sends; None if it is not a source.
      sizes: Bytes that each source sends, by process.
      timeout_secs: Seconds without progress after which it fails.

    Returns:
      Bytes that this process received; None if it is not a destination.

    Raises:
      TimeoutError: If another process does not take part.
    """
    rank = jax.process_index()
    source = next((a for a, b in pairs if b == rank), None)
    received = None if source is None else np.empty(sizes[source], np.uint8)
    total = max(sizes[a] for a, _ in pairs)
    # The last chunk is padded to the same size: one program is compiled for all.
    chunk = min(_CHUNK_BYTES, total)
    devices = _first_devices()
    permute = _permutation(devices, tuple(pairs))
    starts = range(0, total, chunk)
    sent = (_put(devices, content, start, chunk) for start in starts)
    for start, array in zip(starts, _ahead(map(permute, sent)), strict=True):
        _wait(array, timeout_secs)
        if received is not None:
            part = received[start : start + chunk]
            part[:] = np.asarray(array.addressable_shards[0].data)[: len(part)]
    return received


def _ahead(arrays: Iterator[jax.Array]) -> Iterator[jax.Array]:
    """Yields each array after the next one has been started."""
    for array, _ in itertools.pairwise(itertools.chain(arrays, [None])):
        assert array is not None
        yield array


@functools.cache
def _first_devices() -> tuple[Device, ...]:
    """Returns the first device of each process, in rank order."""
    first: dict[int, Device] = {}
    for device in jax.devices():
        first.setdefault(device.process_index, device)
    return tuple(first[rank] for rank in sorted(first))


@functools.cache
def _permutation(
    devices: tuple[Device, ...], pairs: tuple[Pair, ...]
) -> Callable[[jax.Array], jax.Array]:
    spec = PartitionSpec(_AXIS)
    permute = functools.partial(jax.lax.ppermute, axis_name=_AXIS, perm=pairs)
    mesh = Mesh(np.array(devices), (_AXIS,))
    return jax.jit(jax.shard_map(permute, mesh=mesh, in_specs=spec, out_specs=spec))


def _put(
    devices: tuple[Device, ...], content: Bytes | None, start: int, chunk: int
) -> jax.Array:
    """Puts a chunk on this process's device, zeros behind its end or without content.

    The chunk is copied first, since XLA:CPU may alias numpy's memory.
    """
    part = np.zeros(chunk, np.uint8)
    if content is not None:
        piece = content[start : start + chunk]
        part[: len(piece)] = piece
    mesh = Mesh(np.array(devices), (_AXIS,))
    return jax.make_array_from_single_device_arrays(
        (len(devices) * chunk,),
        NamedSharding(mesh, PartitionSpec(_AXIS)),
        [jax.device_put(part, devices[jax.process_index()])],
    )


def _wait(array: Any, timeout_secs: float) -> None:
    end = time.monotonic() + timeout_secs
    while not array.is_ready():
        if time.monotonic() > end:
            raise TimeoutError(f"nothing came within {timeout_secs} s")
        time.sleep(0.001)
