"""Shards among the arrays that a loop slices, rebuilt of their leaves."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from fsdp_jax.step._lifted_gathers import LiftedGathers, NotLiftedError
from fsdp_jax.step._shard import Shard


@dataclasses.dataclass(frozen=True)
class Leaf:
    """Leaf number `index` of shard number `shard`, and whether it is of its value."""

    shard: int
    index: int
    is_value: bool = dataclasses.field(default=True, compare=False)


@dataclasses.dataclass(frozen=True)
class SlicedShards:
    """The shards among the arrays that a loop slices.

    Attributes:
      trees: Structure of each shard that the loop gathers.
      places: For each leaf of these shards, its index among the sliced arrays.
      read: Indices of the leaves that the gather reads.
      own: Indices of all leaves of shards among the sliced arrays.
      others: Indices of the sliced arrays that are not shards.
    """

    trees: tuple[Any, ...]
    places: tuple[int, ...]
    read: tuple[int, ...]
    own: tuple[int, ...]
    others: tuple[int, ...]

    @classmethod
    def of(
        cls,
        shards: Sequence[Shard],
        leaves: Sequence[Leaf | None],
        lifted: LiftedGathers,
    ) -> SlicedShards:
        own = [at for at, leaf in enumerate(leaves) if leaf]
        places = {leaf: at for at, leaf in enumerate(leaves) if leaf}
        if len(places) < len(own):
            raise NotLiftedError("it slices several parts of one stack")
        read = [leaf for at in lifted.read if (leaf := leaves[own[at]])]
        gathered = dict.fromkeys(leaf.shard for leaf in read)
        trees = {i: jax.tree.structure(shards[i]) for i in gathered}
        wanted = [Leaf(i, j) for i in gathered for j in range(trees[i].num_leaves)]
        if not places.keys() >= set(wanted):
            raise NotLiftedError("it slices only some of the arrays of a shard")
        return cls(
            tuple(trees.values()),
            tuple(places[leaf] for leaf in wanted),
            tuple(wanted.index(leaf) for leaf in read),
            tuple(own),
            tuple(at for at, leaf in enumerate(leaves) if leaf is None),
        )

    def shards(self, xs: Sequence[Any]) -> list[Shard]:
        """Returns the shards that the loop gathers, each a stack."""
        given = iter(self.places)
        return [
            tree.unflatten([xs[next(given)] for _ in range(tree.num_leaves)])
            for tree in self.trees
        ]

    def stacks(self, xs: Sequence[Any]) -> list[Any]:
        """Returns all leaves of shards among the sliced arrays."""
        return [xs[at] for at in self.own]
