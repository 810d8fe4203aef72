"""A pullback without the residuals that backward has anyway."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fsdp_jax._tree import PyTree

Leaves = list[Array]


@dataclasses.dataclass(frozen=True)
class Pullback:
    """The pullback of `jax.vjp`, without residuals that backward has anyway.

    Some residuals are inputs of the unit: weights, which backward gathers again, and
    slices and constants, which the caller holds.

    Attributes:
      treedef: Structure of the pullback as a pytree of its residuals.
      places: Index of each residual among the known leaves; None if it is to be saved.
    """

    treedef: Any
    places: tuple[int | None, ...]

    @classmethod
    def of(cls, pull: Any, known: PyTree) -> tuple[Pullback, Leaves]:
        """Splits `pull` into its form and the residuals that are not `known`."""
        leaves, treedef = jax.tree.flatten(pull)
        # By identity: a residual that is an input is the same tracer.
        at = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves(known))}
        places = tuple(at.get(id(leaf)) for leaf in leaves)
        pairs = zip(leaves, places, strict=True)
        saved = [jnp.asarray(leaf) for leaf, place in pairs if place is None]
        return cls(treedef, places), saved

    def rebuild(self, saved: Leaves, known: PyTree) -> Any:
        given, have = iter(saved), jax.tree.leaves(known)
        return self.treedef.unflatten(
            next(given) if place is None else have[place] for place in self.places
        )
