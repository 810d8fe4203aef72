"""Partition of pytrees into floating-point leaves and all others."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fsdp_jax._tree import PyTree

Leaves = list[Array]


@dataclasses.dataclass(frozen=True)
class FloatPartition:
    """A partition of several trees into floating-point leaves and all others.

    Only the former are differentiated: keys and integers have no cotangent of their own
    dtype.

    Attributes:
      treedefs: Structure of each tree.
      is_float: For each tree, whether each of its leaves is floating point.
    """

    treedefs: tuple[Any, ...]
    is_float: tuple[tuple[bool, ...], ...]

    @classmethod
    def of(cls, *trees: PyTree) -> FloatPartition:
        """Makes the partition of `trees`."""
        leaves = [jax.tree.leaves(tree) for tree in trees]
        return cls(
            tuple(map(jax.tree.structure, trees)),
            tuple(
                tuple(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in each)
                for each in leaves
            ),
        )

    def floats(self, trees: Sequence[PyTree]) -> tuple[Leaves, ...]:
        """Returns the floating-point leaves of each tree."""
        return self._chosen(trees, of_floats=True)

    def others(self, trees: Sequence[PyTree]) -> tuple[Leaves, ...]:
        """Returns all other leaves of each tree."""
        return self._chosen(trees, of_floats=False)

    def join(
        self, floats: Sequence[Leaves], others: Sequence[Leaves]
    ) -> tuple[PyTree, ...]:
        """Rebuilds the trees from their floating-point and other leaves."""
        joined = []
        for treedef, mask, f, o in zip(
            self.treedefs, self.is_float, floats, others, strict=True
        ):
            given = {True: iter(f), False: iter(o)}
            joined.append(treedef.unflatten(next(given[kind]) for kind in mask))
        return tuple(joined)

    def _chosen(self, trees, *, of_floats: bool) -> tuple[Leaves, ...]:
        chosen = []
        for tree, mask in zip(trees, self.is_float, strict=True):
            pairs = zip(jax.tree.leaves(tree), mask, strict=True)
            chosen.append([leaf for leaf, kind in pairs if kind == of_floats])
        return tuple(chosen)
