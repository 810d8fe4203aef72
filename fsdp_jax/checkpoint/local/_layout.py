"""Layout of a save: the parts of every leaf that each process held."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fsdp_jax._box import Box, box_of, full_box, num_elements
from fsdp_jax.checkpoint._leaf_names import Leaf

# Sorted boxes of each process, without duplicates among its devices.
Table = tuple[tuple[Box, ...], ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Split of leaves over processes; equal in all files of a save.

    Attributes:
      leaves: Logical shape and dtype of every leaf, by dotted name.
      splits: Index into `tables`, by leaf name.
      tables: Boxes of each process; leaves of equal shape and sharding share one.
    """

    leaves: dict[str, jax.ShapeDtypeStruct]
    splits: dict[str, int]
    tables: tuple[Table, ...]

    def boxes(self, name: str, process: int) -> tuple[Box, ...]:
        """Returns the boxes of a leaf that a process held."""
        return self.tables[self.splits[name]][process]

    def table(self, name: str) -> Table:
        """Returns the boxes of a leaf that each process held."""
        return self.tables[self.splits[name]]

    def shards(self, process: int) -> list[tuple[str, Box]]:
        """Returns the `(leaf, box)` of a process's shards, in its file's order."""
        return [(n, box) for n in self.leaves for box in self.boxes(n, process)]

    def num_bytes(self, name: str, box: Box) -> int:
        """Returns the bytes of a shard."""
        return num_elements(box) * self.leaves[name].dtype.itemsize

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
            tuple(tuple((start, stop) for start, stop in box) for box in boxes)
            for boxes in table
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
    boxes = functools.cache(_boxes)
    tables: dict[Table, int] = {}
    splits = {}
    for name, leaf in leaves.items():
        sharding = getattr(leaf.value, "sharding", None)
        table = boxes(sharding, tuple(leaf.value.shape), tuple(leaf.shape))
        splits[name] = tables.setdefault(table, len(tables))
    abstract = {name: leaf.abstract for name, leaf in leaves.items()}
    return Layout(abstract, splits, tuple(tables))


def logical_box(index: Any, shape: tuple[int, ...], logical: tuple[int, ...]) -> Box:
    """Returns the box of the logical array that a shard of the padded one holds.

    Args:
      index: Slice in each dim of the padded array.
      shape: Shape of the padded array.
      logical: Logical shape, without padding.
    """
    bounds = zip(box_of(index, shape), logical, strict=True)
    return tuple((min(start, end), min(stop, end)) for (start, stop), end in bounds)


def _boxes(
    sharding: jax.sharding.Sharding | None,
    shape: tuple[int, ...],
    logical: tuple[int, ...],
) -> Table:
    """Returns each process's boxes; without a sharding (numpy) the whole array."""
    if sharding is None:
        return ((full_box(logical),),) * jax.process_count()
    held: list[set[Box]] = [set() for _ in range(jax.process_count())]
    for device, index in sharding.devices_indices_map(shape).items():
        held[device.process_index].add(logical_box(index, shape, logical))
    return tuple(tuple(sorted(r for r in one if num_elements(r))) for one in held)
