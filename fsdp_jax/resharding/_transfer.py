"""Moves one array to another sharding, piece by piece between devices.

Shards of S devices are moved to T devices in rounds; in each a device reads and writes
one piece of the shape `sizes`. All arrays are split over dim 0, a shard or a piece on
each device, so that a program is the same for all devices and compile time does not
grow with their number:

    round | cut                        | send                | write
    ------+----------------------------+---------------------+------------------------
    reads | shards [S * s0, s1, ...]   | pieces, by source   | pieces, by target
    makes | pieces [S * sizes[0], ...] | [T * sizes[0], ...] | shards [T * t0, t1, ...]
    by    | `dynamic_slice`            | `ppermute`; in one  | `dynamic_update_slice`
          |                            | process by copies   | where one was received

`jax.device_put` between two shardings of a mesh is one program too, but XLA may gather
the whole array for it, and it does not say so.
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
        _flat_mesh([chunk.device for chunk in chunks(after)]),
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


def _flat_mesh(devices: Sequence[Any]) -> Mesh:
    """Returns a mesh of the one axis `device`, in the order of `devices`."""
    return Mesh(np.array(devices), (_AXIS,))


def _devices(stack: Array) -> list[Any]:
    sharding: Any = stack.sharding
    return list(sharding.mesh.devices.flat)


def _shard_shape(array: Any) -> tuple[int, ...]:
    return tuple(array.sharding.shard_shape(array.shape))


def _stacked(array: Array) -> Array:
    """Returns the shards of all devices, concatenated along dim 0, without a copy."""
    shape = _shard_shape(array)
    mesh = _flat_mesh([chunk.device for chunk in chunks(array)])
    return jax.make_array_from_single_device_arrays(
        (mesh.size * shape[0], *shape[1:]),
        NamedSharding(mesh, _EACH),
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
    """Cuts a piece out of each device's shard, narrow floats as unsigned integers.

    Devices that send nothing return an arbitrary piece, which no one reads.
    """
    starts = {piece.source: piece.read_at for piece in pairs}
    mesh = _flat_mesh(_devices(stack))
    sizes = pairs[0].sizes
    return _cut_program(mesh, sizes)(stack, _per_device(mesh, starts, len(sizes)))


def _write(stack: Array, pieces: Array, pairs: Sequence[Piece]) -> Array:
    """Writes a piece into each device's shard, where it has received one."""
    starts = {piece.target: piece.write_at for piece in pairs}
    mesh = _flat_mesh(_devices(stack))
    # 1 on devices that received a piece; the others keep their shard as it is.
    valid = {device: (1,) for device in starts}
    given = (stack, pieces, _per_device(mesh, starts, stack.ndim))
    return _write_program(mesh)(*given, _per_device(mesh, valid, 1))


def _per_device(
    mesh: Mesh, values: Mapping[Any, tuple[int, ...]], width: int
) -> jax.Array:
    """Returns `int32[devices, width]`, a row on each device; 0 where none is given."""
    rows = [values.get(device, (0,) * width) for device in mesh.devices.flat]
    table = np.array(rows, np.int32).reshape(mesh.size, width)
    sharding = NamedSharding(mesh, _EACH)
    return jax.make_array_from_callback(table.shape, sharding, lambda i: table[i])


_copy_program = jax.jit(jnp.copy)


@functools.lru_cache(maxsize=256)
def _cut_program(mesh: Mesh, sizes: tuple[int, ...]) -> Any:
    def local(shard, starts):
        return lax.dynamic_slice(_as_bits(shard), list(starts[0]), sizes)

    return jax.jit(_mapped(local, mesh, 2))


@functools.lru_cache(maxsize=256)
def _write_program(mesh: Mesh) -> Any:
    def local(shard, piece, starts, valid):
        def write():
            new = lax.dynamic_update_slice(_as_bits(shard), piece, list(starts[0]))
            is_same = new.dtype == shard.dtype
            return new if is_same else lax.bitcast_convert_type(new, shard.dtype)

        return lax.cond(valid[0, 0] > 0, write, lambda: shard)

    return jax.jit(_mapped(local, mesh, 4), donate_argnums=0)


def _as_bits(x: Array) -> Array:
    """Returns floats of 8 and 16 bits as unsigned integers, and others as they are.

    XLA for CPUs moves such floats as wider ones, which changes the bits of NaNs.
    """
    unsigned = {8: jnp.uint8, 16: jnp.uint16}
    width = jax.dtypes.itemsize_bits(x.dtype)
    if not jnp.issubdtype(x.dtype, jnp.floating) or width not in unsigned:
        return x
    return lax.bitcast_convert_type(x, unsigned[width])


@functools.lru_cache(maxsize=256)
def _permute_program(mesh: Mesh, pairs: tuple[tuple[int, int], ...]) -> Any:
    return jax.jit(_mapped(lambda x: lax.ppermute(x, _AXIS, pairs), mesh, 1))


def _mapped(local: Any, mesh: Mesh, count: int) -> Any:
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(_EACH,) * count,
        out_specs=_EACH,
        check_vma=False,
    )


@functools.lru_cache(maxsize=256)
def _zeros_program(mesh: Mesh, shape: tuple[int, ...], dtype: Any) -> Any:
    whole = (mesh.size * shape[0], *shape[1:])
    sharding = NamedSharding(mesh, _EACH)
    return jax.jit(lambda: jnp.zeros(whole, dtype), out_shardings=sharding)


def _zeros(mesh: Mesh, shape: tuple[int, ...], dtype: Any) -> Array:
    return _zeros_program(mesh, shape, dtype)()


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
    return _of_shards(_flat_mesh(targets), sizes, shards, cut.dtype), received


def _permute(
    cut: Array, pairs: Sequence[Piece], targets: Sequence[Any]
) -> tuple[Array, int]:
    """Sends pieces by one `ppermute` over all devices that send or receive."""
    sizes = pairs[0].sizes
    sources = _devices(cut)
    mesh = _flat_mesh(sorted({*sources, *targets}, key=lambda device: device.id))
    order = {device: i for i, device in enumerate(mesh.devices.flat)}
    shards = {shard.device: shard.data for shard in cut.addressable_shards}
    mine = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
    given = [
        shards[d] if d in shards else jax.device_put(np.zeros(sizes, cut.dtype), d)
        for d in mine
    ]
    links = tuple((order[piece.source], order[piece.target]) for piece in pairs)
    stack = _of_shards(mesh, sizes, given, cut.dtype)
    sent = jax.block_until_ready(_permute_program(mesh, links)(stack))
    found = {shard.device: shard.data for shard in sent.addressable_shards}
    received = [p for p in pairs if p.is_sent and p.target in found]
    shards = [found[device] for device in targets if device in found]
    nbytes = sum(found[piece.target].nbytes for piece in received)
    return _of_shards(_flat_mesh(targets), sizes, shards, cut.dtype), nbytes


def _of_shards(
    mesh: Mesh, sizes: tuple[int, ...], shards: Sequence[Any], dtype: Any
) -> Array:
    shape = (mesh.size * sizes[0], *sizes[1:])
    return jax.make_array_from_single_device_arrays(
        shape, NamedSharding(mesh, _EACH), list(shards), dtype=dtype
    )
