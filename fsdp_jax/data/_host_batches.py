"""Each host reads its own rows, and together they are one global batch."""

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
    """Which part of every global batch this host reads.

    Attributes:
      index: Which of the parts, in the order of their rows.
      count: How many parts there are; processes that hold the same rows read the same.
    """

    index: int
    count: int


def host_shard(mesh: Mesh) -> HostShard:
    """Finds the rows of a batch that the devices of this process hold.

    Raises:
      ValueError: If they are no whole part: processes share some rows, and not others.
        Or if this process has no device of the mesh.
    """
    parts = _parts(mesh)
    mine = parts.get(jax.process_index())
    if mine is None:
        raise ValueError(
            f"The mesh is of devices of process {', '.join(map(str, parts))}, and has "
            f"none of process {jax.process_index()}. Use devices of every process."
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
    """The data ranks that each process holds."""
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
    """A host's rows of each global batch, as a source for grain or any loader.

    Global batch `i` is the rows `i * batch` to `(i + 1) * batch` of a dataset, whatever
    the number of hosts, and each host reads its part of these alone. So a run goes on
    with the same batches on other hosts, from the one number that says how many it saw:
    the state of grain's iterator, the same in every process.

    The rows of a last batch that is not full are its first; a host that they do not
    reach gets less, or an array of no rows, and `global_batch` pads it if told to.
    Nothing is left out: `len` counts the last batch too.

    ```
    rows = grain.MapDataset.source(data).seed(0).shuffle()
    batches = HostBatches(rows, batch, fsdp.host_shard(mesh))
    loader = iter(grain.MapDataset.source(batches).to_iter_dataset())
    ```

    Attributes:
      dataset: `len(dataset)` and `dataset[i]`, a pytree of arrays or numbers: one row.
      batch: Rows of a global batch; the hosts divide it.
      shard: From `host_shard`.
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
        """Global batches, the last included if it is not full."""
        return -(-len(self.dataset) // self.batch)

    def __getitem__(self, index: int) -> Rows:
        """The rows of this host of one global batch, stacked."""
        if not 0 <= index < len(self):
            raise IndexError(f"Batch {index} of {len(self)}.")
        share = self.batch // self.shard.count
        first = index * self.batch + self.shard.index * share
        numbers = range(
            min(first, len(self.dataset)), min(first + share, len(self.dataset))
        )
        rows = [self.dataset[number] for number in numbers]
        if not rows:
            return jax.tree.map(lambda x: np.stack([x])[:0], self.dataset[0])
        return jax.tree.map(lambda *each: np.stack(each), *rows)


def global_batch(mesh: Mesh, rows: Rows, batch: int) -> Any:
    """Makes one global batch of what each host has read.

    No host holds or sends rows of another.

    Args:
      mesh: Of the plan.
      rows: This host's, as `HostBatches` gives them: `[batch / hosts, ...]`.
      batch: Rows of the global batch.

    Returns:
      The same tree of global arrays, `[batch, ...]`, for `make_train_step`'s step.

    Raises:
      ValueError: If this host has another number of rows.
    """
    share = batch // host_shard(mesh).count
    found = {int(x.shape[0]) for x in jax.tree.leaves(rows)}
    if found != {share}:
        raise ValueError(
            f"Of a global batch of {batch} rows this host has {share}; got "
            f"{', '.join(map(str, sorted(found))) or 'none'}. For a last batch that is "
            "not full there is padded_global_batch."
        )
    return _place(mesh, rows, batch)


def padded_global_batch(
    mesh: Mesh, rows: Rows, batch: int
) -> tuple[Any, Bool[Array, " batch"]]:
    """Makes a global batch of fewer rows than it has, and says which are none.

    Rows are added by repeating this host's from the first on, zeros where it has none.
    A loss must leave them out: with `calculate_per_token_loss=True`, by counting them
    as nothing.

    Args:
      mesh: Of the plan.
      rows: This host's, `[at most batch / hosts, ...]`.
      batch: Rows of the global batch.

    Returns:
      The global batch, and a mask that is False for rows that were added.

    Raises:
      ValueError: If this host has too many rows, or leaves differ in theirs.
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
