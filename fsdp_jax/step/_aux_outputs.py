"""Reduces the auxiliary outputs of a loss over ranks and microbatches."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from fsdp_jax._tree import PyTree, named_leaves
from fsdp_jax.data._batch import join_microbatches
from fsdp_jax.sharding._mesh import BATCH_AXES

Parts = dict[str, list[Array]]
"""Leaves of `aux` grouped by their reduction: "means", "sums" and "rows"."""

AUX_SPECS = {
    "means": PartitionSpec(),
    "sums": PartitionSpec(),
    "rows": PartitionSpec(BATCH_AXES),
}
"""Output specs in `shard_map` of the reduced parts."""


class AuxFormat:
    """Groups the leaves of `aux` by their reduction, and remembers their order.

    `shard_map` takes its output specs before it traces what the outputs are, so that
    these are specs of the groups, and the structure of `aux` is known only afterwards.
    """

    def __init__(self, *, has_whole_rows: bool = True):
        """Makes a format without a structure, which `take_apart` sets.

        Args:
          has_whole_rows: Whether each rank has full sequences, and not a part over cp.
        """
        self._has_whole_rows = has_whole_rows
        self._treedef: Any = None
        self._kinds: list[str] = []

    def take_apart(self, aux: PyTree) -> Parts:
        """Groups leaves: float scalars are means, other scalars sums, arrays rows.

        Args:
          aux: Tree of scalars and of arrays with a leading batch dim.

        Returns:
          The leaves by group. Scalars of fewer than 32 bits are widened.

        Raises:
          ValueError: If `aux` has arrays and ranks have parts of sequences.
        """
        # Called under a trace, once or more; each trace sets the same structure.
        leaves, self._treedef = jax.tree.flatten(aux)
        arrays = [_widen(jnp.asarray(leaf)) for leaf in leaves]
        self._kinds = [_kind(leaf) for leaf in arrays]
        if "rows" in self._kinds and not self._has_whole_rows:
            raise ValueError(_parts_of_rows(aux))
        return {
            kind: [a for a, k in zip(arrays, self._kinds, strict=True) if k == kind]
            for kind in AUX_SPECS
        }

    def put_together(self, parts: Parts) -> PyTree:
        """Rebuilds `aux` from its groups: the inverse of `take_apart`."""
        iterators = {kind: iter(leaves) for kind, leaves in parts.items()}
        return self._treedef.unflatten(next(iterators[kind]) for kind in self._kinds)


def join_aux(stacked: list[Parts]) -> Parts:
    """Joins `aux` of several microbatches, which are a leading dim of each leaf."""
    # The microbatches of the loop, then one more if the last is not in the loop.
    joined = jax.tree.map(lambda *pieces: jnp.concatenate(pieces), *stacked)
    return {
        "means": [x.mean(0) for x in joined["means"]],
        "sums": [x.sum(0) for x in joined["sums"]],
        "rows": join_microbatches(joined["rows"]),
    }


def reduce_aux(aux: Parts, data_axes: tuple[str, ...]) -> Parts:
    """Reduces means and sums over ranks; `shard_map` concatenates the rows."""
    if not data_axes:
        return aux
    return {
        "means": [lax.pmean(x, data_axes) for x in aux["means"]],
        "sums": [lax.psum(x, data_axes) for x in aux["sums"]],
        "rows": aux["rows"],
    }


def _parts_of_rows(aux: PyTree) -> str:
    arrays = [(name, jnp.shape(leaf)) for name, leaf in named_leaves(aux)]
    shown = ", ".join(f"{n or 'output'} {shape}" for n, shape in arrays if shape)
    return (
        f"Over cp each rank has a part of each row, and no plan says which dim of "
        f"{shown} is the sequence. Return scalars beside the loss (means and sums), or "
        "use a mesh without cp to have arrays."
    )


def _widen(leaf: Array) -> Array:
    """Widens scalars to 32 bits: sums over ranks would overflow or round in fewer."""
    if leaf.ndim:
        return leaf
    inexact = jnp.issubdtype(leaf.dtype, jnp.inexact)
    wide = jnp.float32 if inexact else jnp.int32
    return leaf.astype(jnp.promote_types(leaf.dtype, wide))


def _kind(leaf: Array) -> str:
    if leaf.ndim:
        return "rows"
    return "means" if jnp.issubdtype(leaf.dtype, jnp.inexact) else "sums"
