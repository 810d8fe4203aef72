"""Digests of a state: of each device's shards, and of values on any mesh.

A leaf's digest is two sums, modulo 2^32, of a hash of each element's bits and its index
in the logical shape. The hash is a bijection of a 32-bit word, so that a change of one
word always changes both sums; an element of 64 bits is two words. Sums do not depend on
an order, so that digests of shards add up to that of the leaf, on any mesh.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import UInt32

from fsdp_jax._tree import PyTree, named_leaves
from fsdp_jax.checkpoint._leaf_names import Leaf, flatten, is_key
from fsdp_jax.replay._array_digest import array_digest
from fsdp_jax.sharding._ambient_mesh import own_mesh
from fsdp_jax.sharding._chunks import chunks
from fsdp_jax.sharding._offload import HOST
from fsdp_jax.training._cpu_sync import settle

Stored = tuple[Any, tuple[int, ...]]
"""An array, and the logical shape of what it stores."""


@dataclasses.dataclass(frozen=True)
class DeviceDigests:
    """Digest of the shard that each device has of each leaf.

    Attributes:
      names: Names of the leaves.
      devices: Devices, in the order of the mesh.
      values: Digests, `uint32[devices, leaves, 2]`; of `watched_digests` 1 sum.
    """

    names: tuple[str, ...]
    devices: tuple[Any, ...]
    values: UInt32[np.ndarray, "devices leaves sums"]

    @property
    def watched(self) -> DeviceDigests:
        """The digests as from `watched_digests`."""
        return dataclasses.replace(self, values=self.values[..., :1])

    def changes(self, later: DeviceDigests) -> dict[Any, tuple[str, ...]]:
        """Returns the leaves whose shard on a device is another one later, by device.

        Args:
          later: Digests of a state with the same leaves on the same mesh.
        """
        differ = (self.values != later.values).any(-1)
        return {
            device: tuple(
                n for n, is_bad in zip(self.names, row, strict=True) if is_bad
            )
            for device, row in zip(self.devices, differ, strict=True)
            if row.any()
        }


@dataclasses.dataclass(frozen=True)
class StateDigest:
    """Digest of a state's values, the same on every mesh.

    Attributes:
      leaves: Digest of each leaf by its name in a checkpoint, 16 hexadecimal digits.
      sha256: SHA-256 of names, shapes, dtypes and digests of all leaves.
    """

    leaves: Mapping[str, str]
    sha256: str

    def differences(self, other: StateDigest) -> tuple[str, ...]:
        """Returns the names of the leaves that differ, or that one of them lacks."""
        names = sorted({*self.leaves, *other.leaves})
        return tuple(n for n in names if self.leaves.get(n) != other.leaves.get(n))


def state_digest(state: PyTree) -> StateDigest:
    """Computes the digest of a state, or of any tree of arrays, on its devices.

    It takes a pass over the state in device memory. Leaves are identified as in a
    checkpoint, so that the digest of a state that was loaded or moved to another mesh
    is the same. It detects accidents; it is not a cryptographic hash of the values.

    Args:
      state: Tree of arrays on one mesh. In a job of several processes all of them must
        call this.

    Examples:
      >>> state = fsdp.init_state(plan, tx, params)
      >>> smaller_mesh = fsdp.make_mesh(devices=jax.devices()[:4])
      >>> other = fsdp.fully_shard(make_model, smaller_mesh, [fsdp.Stacked("layers")])
      >>> digest = fsdp.replay.state_digest(state)
      >>> moved = fsdp.reshard(state, other, tx)
      >>> digest == fsdp.replay.state_digest(moved)
      True
    """
    leaves = flatten(state)
    found = _digests({n: (leaf.value, leaf.shape) for n, leaf in leaves.items()})
    sums = {
        name: _sum_of_parts(leaf, found, column)
        for column, (name, leaf) in enumerate(leaves.items())
    }
    kinds = {
        n: [list(leaf.shape), str(leaf.value.dtype), sums[n]]
        for n, leaf in leaves.items()
    }
    text = json.dumps(kinds, sort_keys=True)
    return StateDigest(sums, hashlib.sha256(text.encode()).hexdigest())


def device_digests(state: PyTree) -> DeviceDigests:
    """Computes the digest of each device's shards, replicas each by itself.

    Args:
      state: Tree of arrays on one mesh. In a job of several processes all of them must
        call this.

    Examples:
      >>> state = fsdp.init_state(plan, tx, params)
      >>> before = fsdp.replay.device_digests(state)
      >>> before.changes(fsdp.replay.device_digests(state))
      {}
    """
    return _digests(stored_arrays(state))


def watched_digests(state: PyTree) -> DeviceDigests:
    """Computes the first sum of `device_digests` alone, in half the time.

    It always changes with one word, and with several but for one time in 2^32: enough
    to see that a state changed between two steps.

    Args:
      state: Tree of arrays on one mesh.
    """
    return _digests(stored_arrays(state), num_sums=1)


def stored_arrays(state: PyTree) -> dict[str, Stored]:
    """Returns the array of each leaf as it is stored, padding and all, and its shape.

    Args:
      state: Tree of arrays, also under a trace.
    """
    arrays = {
        name: jax.random.key_data(leaf)
        if is_key(leaf)
        else getattr(leaf, "value", leaf)
        for name, leaf in named_leaves(state)
    }
    return {name: (array, tuple(array.shape)) for name, array in arrays.items()}


def digest_function(
    arrays: Mapping[str, Stored], num_sums: int = 2
) -> Callable[..., Any]:
    """Makes the function of such arrays to `uint32[devices, leaves, sums]`, replicated.

    Args:
      arrays: Arrays of one mesh, with the logical shape of each.
      num_sums: 2, or 1 for the first sum alone.
    """
    values = [array for array, _ in arrays.values()]
    shardings = [array.sharding for array in values]
    return _program(
        shardings[0].mesh,
        tuple(sharding.spec for sharding in shardings),
        tuple(shape for _, shape in arrays.values()),
        tuple(sharding.memory_kind == HOST for sharding in shardings),
        num_sums,
    )


def _digests(arrays: Mapping[str, Stored], num_sums: int = 2) -> DeviceDigests:
    values = [array for array, _ in arrays.values()]
    mesh = values[0].sharding.mesh
    with own_mesh(mesh):
        found = settle(mesh, digest_function(arrays, num_sums)(*values))
    return DeviceDigests(
        tuple(arrays), tuple(mesh.devices.flat), np.asarray(found, np.uint32)
    )


def _sum_of_parts(leaf: Leaf, found: DeviceDigests, column: int) -> str:
    """Adds the digests of all parts of a leaf, each once."""
    row_of = {device: row for row, device in enumerate(found.devices)}
    rows = [row_of[c.device] for c in chunks(leaf.value) if c.replica_id == 0]
    total = found.values[rows, column].sum(0, dtype=np.uint32)
    return "".join(f"{int(word):08x}" for word in total)


@functools.lru_cache(maxsize=64)
def _program(
    mesh: Mesh,
    specs: tuple[PartitionSpec, ...],
    shapes: tuple[tuple[int, ...], ...],
    on_host: tuple[bool, ...],
    num_sums: int,
) -> Any:
    """Compiles the digests of all leaves, a row of `uint32[leaves, sums]` a device."""

    def local(*shards):
        rows = [
            array_digest(shard, _offsets(spec, shard.shape), shape, num_sums)
            for shard, spec, shape in zip(shards, specs, shapes, strict=True)
        ]
        return jnp.stack(rows)[None]

    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=specs,
        out_specs=PartitionSpec(mesh.axis_names),
        check_vma=False,
    )

    def digests(*arrays):
        # Only state in host memory is sent: XLA would copy what is on the device too.
        return mapped(
            *(
                jax.device_put(x, jax.memory.Space.Device) if is_on_host else x
                for x, is_on_host in zip(arrays, on_host, strict=True)
            )
        )

    return jax.jit(digests, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _offsets(spec: PartitionSpec, shape: tuple[int, ...]) -> list[Any]:
    """Returns where the shard of this device begins, in each dim."""
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    return [
        0 if entry is None else lax.axis_index(entry) * size
        for entry, size in zip(entries, shape, strict=True)
    ]
