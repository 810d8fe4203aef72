"""Trees of which only the floating-point leaves are differentiated."""

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
class Mixed:
    """Trees whose floating-point leaves are held apart from all others.

    Only the former have gradients; keys and integers would have none of any dtype.
    """

    treedefs: tuple[Any, ...]
    is_float: tuple[tuple[bool, ...], ...]

    @classmethod
    def of(cls, *trees: PyTree) -> Mixed:
        """Of these trees."""
        leaves = [jax.tree.leaves(tree) for tree in trees]
        return cls(
            tuple(map(jax.tree.structure, trees)),
            tuple(
                tuple(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in each)
                for each in leaves
            ),
        )

    def floats(self, trees: Sequence[PyTree]) -> tuple[Leaves, ...]:
        """The floating-point leaves of each tree."""
        return self._chosen(trees, of_floats=True)

    def others(self, trees: Sequence[PyTree]) -> tuple[Leaves, ...]:
        """All other leaves of each tree."""
        return self._chosen(trees, of_floats=False)

    def join(
        self, floats: Sequence[Leaves], others: Sequence[Leaves]
    ) -> tuple[PyTree, ...]:
        """The trees again."""
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
