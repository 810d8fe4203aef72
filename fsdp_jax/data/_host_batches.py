"""Per-host loading: each host reads its own rows of a global batch."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool

from fsdp_jax.sharding._mesh import BATCH_AXES, num_devices

Rows = Any
"""A pytree of numpy arrays, `[rows, ...]`."""


@dataclasses.dataclass(frozen=True)
class HostShard:
    """The part of every global batch that this host reads.

    Attributes:
      index: Index of the part, in the order of their rows.
      count: Number of parts; processes that hold the same rows read the same part.
    """

    index: int
    count: int


def host_shard(mesh: Mesh) -> HostShard:
    """Returns the part of a batch that the devices of this process hold.

    Args:
      mesh: Device mesh of the plan.

    Returns:
      Index of the part, and the number of parts.

    Raises:
      ValueError: If the rows of this process are not one whole part, because processes
        share some rows and not others, or if it has no device of the mesh.

    Examples:
      >>> fsdp.host_shard(mesh)
      HostShard(index=0, count=1)
    """
    parts = _parts(mesh)
    mine = parts.get(jax.process_index())
    if mine is None:
        raise ValueError(
            f"The mesh has devices of process {', '.join(map(str, parts))}, but none "
            f"of process {jax.process_index()}. Use devices of every process."
        )
    found = sorted(set(parts.values()))
    ranks = [rank for part in found for rank in part]
    if (
        ranks != list(range(num_devices(mesh, BATCH_AXES)))
        or len(set(map(len, found))) > 1
    ):
        raise ValueError(
            "The processes' devices hold parts of a batch that overlap or interleave: "
            + "; ".join(f"process {p}: data ranks {part}" for p, part in parts.items())
            + ". Make the mesh of jax.devices() in order, with tp and cp inside a "
            "process or whole processes along them."
        )
    return HostShard(found.index(mine), len(found))


def _parts(mesh: Mesh) -> dict[int, tuple[int, ...]]:
    """Returns the data ranks that each process holds."""
    dims = [mesh.axis_names.index(axis) for axis in BATCH_AXES]
    ranks = np.moveaxis(mesh.devices, dims, range(len(dims)))
    ranks = ranks.reshape(num_devices(mesh, BATCH_AXES), -1)
    held: dict[int, set[int]] = {}
    for rank, devices in enumerate(ranks):
        for device in devices:
            held.setdefault(device.process_index, set()).add(rank)
    return {process: tuple(sorted(part)) for process, part in sorted(held.items())}


@dataclasses.dataclass(frozen=True, eq=False)
class HostBatches:
    """A host's rows of each global batch, as a source for grain or any other loader.

    Global batch `i` is the rows `i * batch` to `(i + 1) * batch` of a dataset, for any
    number of hosts, and each host reads only its part of them. So a run resumes with
    the same batches on a different number of hosts from one number, the batches seen so
    far: the state of grain's iterator, the same in every process.

    A last batch that is not full holds fewer rows, filled from its start: a host beyond
    them gets fewer rows or an array of no rows, and `padded_global_batch` pads it. No
    row is dropped: `len` counts the last batch too.

    ```
    rows = grain.MapDataset.source(data).seed(0).shuffle()
    batches = HostBatches(rows, batch, fsdp.host_shard(mesh))
    loader = iter(grain.MapDataset.source(batches).to_iter_dataset())
    ```

    Attributes:
      dataset: Random-access dataset: `len(dataset)`, and `dataset[i]`, one row as a
        pytree of arrays or numbers.
      batch: Number of rows of a global batch, a multiple of the number of hosts.
      shard: Part of this host, from `host_shard`.

    Raises:
      ValueError: If `batch` is not a positive multiple of the number of hosts.

    Examples:
      >>> dataset = [{"x": np.full(16, row)} for row in range(20)]
      >>> batches = fsdp.HostBatches(dataset, 8, fsdp.host_shard(mesh))
      >>> [batches[index]["x"].shape for index in range(len(batches))]
      [(8, 16), (8, 16), (4, 16)]
    """

    dataset: Any
    batch: int
    shard: HostShard

    def __post_init__(self):
        if self.batch < 1 or self.batch % self.shard.count:
            raise ValueError(
                f"A global batch of {self.batch} rows does not divide into "
                f"{self.shard.count} hosts."
            )

    def __len__(self) -> int:
        """Returns the number of global batches, including one that is not full."""
        return -(-len(self.dataset) // self.batch)

    def __getitem__(self, index: int) -> Rows:
        """Returns the rows of this host of one global batch, stacked."""
        if not 0 <= index < len(self):
            raise IndexError(f"Batch {index} is out of range: there are {len(self)}.")
        share = self.batch // self.shard.count
        first = index * self.batch + self.shard.index * share
        numbers = range(
            min(first, len(self.dataset)), min(first + share, len(self.dataset))
        )
        rows = [self.dataset[number] for number in numbers]
        if not rows:
            # Row 0 provides the structure, shapes and dtypes of an array of no rows.
            return jax.tree.map(lambda x: np.stack([x])[:0], self.dataset[0])
        return jax.tree.map(lambda *each: np.stack(each), *rows)


def global_batch(mesh: Mesh, rows: Rows, batch: int) -> Any:
    """Makes one global batch from the rows that each host has read.

    No host stores or sends rows of another.

    Args:
      mesh: Device mesh of the plan.
      rows: Rows of this host, from `HostBatches`: `[batch / hosts, ...]`.
      batch: Number of rows of the global batch.

    Returns:
      The same tree of global arrays, `[batch, ...]`, for the step of `make_train_step`.

    Raises:
      ValueError: If this host has another number of rows.

    Examples:
      >>> rows = {"x": np.ones((8, 16), np.float32)}
      >>> x = fsdp.global_batch(mesh, rows, 8)["x"]
      >>> x.shape, x.sharding.shard_shape(x.shape)
      ((8, 16), (1, 16))
    """
    share = batch // host_shard(mesh).count
    found = {int(x.shape[0]) for x in jax.tree.leaves(rows)}
    if found != {share}:
        raise ValueError(
            f"Of a global batch of {batch} rows this host has {share}; got "
            f"{', '.join(map(str, sorted(found))) or 'none'}. For a last batch that is "
            "not full use padded_global_batch."
        )
    return _place(mesh, rows, batch)


def padded_global_batch(
    mesh: Mesh, rows: Rows, batch: int
) -> tuple[Any, Bool[Array, " batch"]]:
    """Makes a global batch from fewer rows than it has, and a mask of the real ones.

    Rows are added by repeating those of this host from the first on, or zeros where it
    has none. A loss must leave them out: with `calculate_per_token_loss=True`, by not
    counting them.

    Args:
      mesh: Device mesh of the plan.
      rows: Rows of this host, `[at most batch / hosts, ...]`.
      batch: Number of rows of the global batch.

    Returns:
      The global batch, and a mask that is False for added rows.

    Raises:
      ValueError: If this host has too many rows, or leaves differ in their number.
    """
    share = batch // host_shard(mesh).count
    found = {int(x.shape[0]) for x in jax.tree.leaves(rows)}
    if len(found) != 1 or max(found) > share:
        raise ValueError(
            f"Of a global batch of {batch} rows this host has at most {share}; got "
            f"{', '.join(map(str, sorted(found))) or 'none'}."
        )
    (real,) = found
    padded = jax.tree.map(lambda x: _padded(x, share), rows)
    mask = np.arange(share) < real
    return _place(mesh, padded, batch), _place(mesh, mask, batch)


def _padded(rows: np.ndarray, share: int) -> np.ndarray:
    if not len(rows):
        return np.zeros((share, *rows.shape[1:]), rows.dtype)
    return rows[np.arange(share) % len(rows)]


def _place(mesh: Mesh, rows: Rows, batch: int) -> Any:
    sharding = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
    return jax.tree.map(
        lambda x: jax.make_array_from_process_local_data(
            sharding, x, (batch, *x.shape[1:])
        ),
        rows,
    )
