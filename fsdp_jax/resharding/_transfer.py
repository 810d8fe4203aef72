"""Moves one array to another sharding, piece by piece between devices.

A round is three programs: each source cuts a piece out of its shard, the pieces are
sent, and each target writes its piece into its new shard. Cutting and writing are one
program for all devices of a mesh with the one axis `device`, so that compile time does
not grow with the number of devices. `jax.device_put` between two shardings of a mesh is
one program too, but XLA may gather the whole array for it, and it does not say so.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped

from fsdp_jax.resharding._pieces import Piece, in_rounds
from fsdp_jax.sharding._chunks import chunks

_AXIS = "device"
_EACH = PartitionSpec(_AXIS)


def transfer(
    before: Shaped[Array, "*padded"],
    after: jax.ShapeDtypeStruct,
    pieces: Sequence[Piece],
    *,
    across_processes: bool,
) -> tuple[Shaped[Array, "*other"], int]:
    """Moves an array of at least one dim.

    Args:
      before: Array in device memory, in its padded shape.
      after: Abstract array of the padded shape and sharding to move to, in device
        memory.
      pieces: Pieces from `pieces_between`.
      across_processes: Whether pieces are sent by a collective of all processes, and
        not by copies between the devices of this one.

    Returns:
      The array, with zeros where no piece is, and the bytes that this process's devices
      received from others.
    """
    sources = _stacked(before)
    targets = _zeros(
        _line([chunk.device for chunk in chunks(after)]),
        _shard_shape(after),
        jnp.dtype(after.dtype),
    )
    received = 0
    for pairs in in_rounds(pieces):
        cut = _cut(sources, pairs)
        send = _permute if across_processes else _copy
        sent, count = send(cut, pairs, _devices(targets))
        targets = _write(targets, sent, pairs)
        # One round at a time is in memory, as `Moves` says.
        jax.block_until_ready(targets)
        received += count
    return _as_sharded(targets, after), received


def copied(
    before: Shaped[Array, "*padded"], after: jax.ShapeDtypeStruct
) -> Shaped[Array, "*padded"]:
    """Copies an array whose parts stay where they are.

    Without the copy, a step that donates the new array would delete the old one.

    Args:
      before: Array in device memory.
      after: Abstract array of which each device has the same part.
    """
    return _as_sharded(_stacked(_copy_program(before)), after)


def _line(devices: Sequence[Any]) -> Mesh:
    return Mesh(np.array(devices), (_AXIS,))


def _devices(stack: Array) -> list[Any]:
    sharding: Any = stack.sharding
    return list(sharding.mesh.devices.flat)


def _shard_shape(array: Any) -> tuple[int, ...]:
    return tuple(array.sharding.shard_shape(array.shape))


def _stacked(array: Array) -> Array:
    """Returns the shards of all devices, one behind the other; nothing is copied."""
    shape = _shard_shape(array)
    line = _line([chunk.device for chunk in chunks(array)])
    return jax.make_array_from_single_device_arrays(
        (line.size * shape[0], *shape[1:]),
        NamedSharding(line, _EACH),
        [shard.data for shard in array.addressable_shards],
        dtype=array.dtype,
    )


def _as_sharded(stack: Array, like: jax.ShapeDtypeStruct) -> Array:
    """Returns the shards as the array that they are: the inverse of `_stacked`."""
    shards = [shard.data for shard in stack.addressable_shards]
    assert like.sharding is not None
    return jax.make_array_from_single_device_arrays(
        like.shape, like.sharding, shards, dtype=like.dtype
    )


def _cut(stack: Array, pairs: Sequence[Piece]) -> Array:
    """Returns a piece of each device's shard; of a device that sends none, any."""
    starts = {piece.source: piece.read_at for piece in pairs}
    line = _line(_devices(stack))
    sizes = pairs[0].sizes
    return _cut_program(line, sizes)(stack, _per_device(line, starts, len(sizes)))


def _write(stack: Array, pieces: Array, pairs: Sequence[Piece]) -> Array:
    """Writes a piece into each device's shard, where it has received one."""
    starts = {piece.target: piece.write_at for piece in pairs}
    line = _line(_devices(stack))
    valid = {device: (1,) for device in starts}
    given = (stack, pieces, _per_device(line, starts, stack.ndim))
    return _write_program(line)(*given, _per_device(line, valid, 1))


def _per_device(
    line: Mesh, values: Mapping[Any, tuple[int, ...]], width: int
) -> jax.Array:
    """Returns `int32[devices, width]`, a row on each device; 0 where none is given."""
    rows = [values.get(device, (0,) * width) for device in line.devices.flat]
    table = np.array(rows, np.int32).reshape(line.size, width)
    sharding = NamedSharding(line, _EACH)
    return jax.make_array_from_callback(table.shape, sharding, lambda i: table[i])


_copy_program = jax.jit(jnp.copy)


@functools.lru_cache(maxsize=256)
def _cut_program(line: Mesh, sizes: tuple[int, ...]) -> Any:
    def local(shard, starts):
        return lax.dynamic_slice(shard, list(starts[0]), sizes)

    return jax.jit(_mapped(local, line, 2))


@functools.lru_cache(maxsize=256)
def _write_program(line: Mesh) -> Any:
    def local(shard, piece, starts, valid):
        def write():
            return lax.dynamic_update_slice(shard, piece, list(starts[0]))

        return lax.cond(valid[0, 0] > 0, write, lambda: shard)

    return jax.jit(_mapped(local, line, 4), donate_argnums=0)


@functools.lru_cache(maxsize=256)
def _permute_program(line: Mesh, pairs: tuple[tuple[int, int], ...]) -> Any:
    return jax.jit(_mapped(lambda x: lax.ppermute(x, _AXIS, pairs), line, 1))


def _mapped(local: Any, line: Mesh, count: int) -> Any:
    return jax.shard_map(
        local, mesh=line, in_specs=(_EACH,) * count, out_specs=_EACH, check_vma=False
    )


@functools.lru_cache(maxsize=256)
def _zeros_program(line: Mesh, shape: tuple[int, ...], dtype: Any) -> Any:
    whole = (line.size * shape[0], *shape[1:])
    sharding = NamedSharding(line, _EACH)
    return jax.jit(lambda: jnp.zeros(whole, dtype), out_shardings=sharding)


def _zeros(line: Mesh, shape: tuple[int, ...], dtype: Any) -> Array:
    return _zeros_program(line, shape, dtype)()


def _copy(
    cut: Array, pairs: Sequence[Piece], targets: Sequence[Any]
) -> tuple[Array, int]:
    """Copies pieces from device to device, all of this process."""
    held = {shard.device: shard.data for shard in cut.addressable_shards}
    source_of = {piece.target: piece.source for piece in pairs}
    sizes = pairs[0].sizes
    received, shards = 0, []
    for device in targets:
        source = source_of.get(device)
        if source is None:
            # Not read: the program of all devices needs an operand on this one.
            filler = held.get(device)
            shards.append(
                jax.device_put(np.zeros(sizes, cut.dtype), device)
                if filler is None
                else filler
            )
            continue
        piece = held[source]
        received += 0 if source == device else piece.nbytes
        shards.append(jax.device_put(piece, device))
    return _of_shards(_line(targets), sizes, shards, cut.dtype), received


def _permute(
    cut: Array, pairs: Sequence[Piece], targets: Sequence[Any]
) -> tuple[Array, int]:
    """Sends pieces by one `ppermute` over all devices that send or receive."""
    sizes = pairs[0].sizes
    sources = _devices(cut)
    line = _line(sorted({*sources, *targets}, key=lambda device: device.id))
    order = {device: i for i, device in enumerate(line.devices.flat)}
    shards = {shard.device: shard.data for shard in cut.addressable_shards}
    mine = [d for d in line.devices.flat if d.process_index == jax.process_index()]
    given = [
        shards[d] if d in shards else jax.device_put(np.zeros(sizes, cut.dtype), d)
        for d in mine
    ]
    links = tuple((order[piece.source], order[piece.target]) for piece in pairs)
    stack = _of_shards(line, sizes, given, cut.dtype)
    sent = jax.block_until_ready(_permute_program(line, links)(stack))
    found = {shard.device: shard.data for shard in sent.addressable_shards}
    received = [p for p in pairs if p.moves and p.target in found]
    shards = [found[device] for device in targets if device in found]
    nbytes = sum(found[piece.target].nbytes for piece in received)
    return _of_shards(_line(targets), sizes, shards, cut.dtype), nbytes


def _of_shards(
    line: Mesh, sizes: tuple[int, ...], shards: Sequence[Any], dtype: Any
) -> Array:
    shape = (line.size * sizes[0], *sizes[1:])
    return jax.make_array_from_single_device_arrays(
        shape, NamedSharding(line, _EACH), list(shards), dtype=dtype
    )
