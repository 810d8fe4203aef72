"""Layout of a save: the parts of every leaf that each process held."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fsdp_jax.checkpoint._leaf_names import Leaf

# (start, stop) in each dim; () for a scalar.
Region = tuple[tuple[int, int], ...]
# Sorted regions of each process, without duplicates among its devices.
Table = tuple[tuple[Region, ...], ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Split of leaves over processes; equal in all files of a save.

    Attributes:
      leaves: Logical shape and dtype of every leaf, by dotted name.
      splits: Index into `tables`, by leaf name.
      tables: Regions of each process; leaves of equal shape and sharding share one.
    """

    leaves: dict[str, jax.ShapeDtypeStruct]
    splits: dict[str, int]
    tables: tuple[Table, ...]

    def regions(self, name: str, process: int) -> tuple[Region, ...]:
        """Returns the regions of a leaf that a process held."""
        return self.tables[self.splits[name]][process]

    def table(self, name: str) -> Table:
        """Returns the regions of a leaf that each process held."""
        return self.tables[self.splits[name]]

    def shards(self, process: int) -> list[tuple[str, Region]]:
        """Returns the `(leaf, region)` of a process's shards, in its file's order."""
        return [(n, region) for n in self.leaves for region in self.regions(n, process)]

    def num_bytes(self, name: str, region: Region) -> int:
        """Returns the bytes of a shard."""
        return size(region) * self.leaves[name].dtype.itemsize

    def duplicates(self, num_processes: int) -> list[int]:
        """Returns, for each process, the first one that held exactly the same shards.

        One file of such duplicates, as in HSDP, is enough.
        """
        held = [tuple(t[rank] for t in self.tables) for rank in range(num_processes)]
        return [held.index(one) for one in held]

    def as_json(self) -> dict[str, Any]:
        """Returns the layout in JSON types; inverse of `layout_from_json`."""
        return {
            "leaves": {
                name: [list(leaf.shape), leaf.dtype.name, self.splits[name]]
                for name, leaf in self.leaves.items()
            },
            "tables": self.tables,
        }


def layout_from_json(value: Mapping[str, Any]) -> Layout:
    """Returns the layout from JSON types; inverse of `Layout.as_json`."""
    tables = tuple(
        tuple(
            tuple(tuple((start, stop) for start, stop in region) for region in regions)
            for regions in table
        )
        for table in value["tables"]
    )
    leaves = {
        name: jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))
        for name, (shape, dtype, _) in value["leaves"].items()
    }
    splits = {name: split for name, (_, _, split) in value["leaves"].items()}
    return Layout(leaves, splits, tables)


def layout_of(leaves: Mapping[str, Leaf]) -> Layout:
    """Returns the layout of concrete or abstract leaves."""
    regions = functools.cache(_regions)
    tables: dict[Table, int] = {}
    splits = {}
    for name, leaf in leaves.items():
        sharding = getattr(leaf.value, "sharding", None)
        table = regions(sharding, tuple(leaf.value.shape), tuple(leaf.shape))
        splits[name] = tables.setdefault(table, len(tables))
    abstract = {name: leaf.abstract for name, leaf in leaves.items()}
    return Layout(abstract, splits, tuple(tables))


def region_of(index: Any, shape: tuple[int, ...], logical: tuple[int, ...]) -> Region:
    """Returns the region of the logical array that a shard of the padded one holds.

    Args:
      index: Slice in each dim of the padded array.
      shape: Shape of the padded array.
      logical: Logical shape, without padding.
    """
    bounds = [part.indices(size) for part, size in zip(index, shape, strict=True)]
    return tuple(
        (min(start, end), min(stop, end))
        for (start, stop, _), end in zip(bounds, logical, strict=True)
    )


def size(region: Region) -> int:
    """Returns the number of elements in a region."""
    return math.prod(stop - start for start, stop in region)


def overlap(one: Region, other: Region) -> Region | None:
    """Returns the intersection of two regions; None if it is empty."""
    common = tuple(
        (max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True)
    )
    return common if all(start < stop for start, stop in common) else None


def _regions(
    sharding: jax.sharding.Sharding | None,
    shape: tuple[int, ...],
    logical: tuple[int, ...],
) -> Table:
    """Returns each process's regions; without a sharding (numpy) the whole array."""
    if sharding is None:
        whole = tuple((0, end) for end in logical)
        return ((whole,),) * jax.process_count()
    held: list[set[Region]] = [set() for _ in range(jax.process_count())]
    for device, index in sharding.devices_indices_map(shape).items():
        held[device.process_index].add(region_of(index, shape, logical))
    return tuple(tuple(sorted(r for r in one if size(r))) for one in held)
