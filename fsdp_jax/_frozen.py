"""Parameters that are not trained: out of what the optimizer sees, and back."""

from __future__ import annotations

import jax
import optax

from fsdp_jax._padded import unpack
from fsdp_jax._plan import Plan
from fsdp_jax._tree import PyTree


def trainable(plan: Plan, tree: PyTree) -> PyTree:
    """What of a tree like the parameters is trained; None in the place of the rest.

    optax passes over None, so `tx.init(trainable(plan, params))` makes no state for
    what is frozen.
    """
    leaves = plan.treedef.flatten_up_to(tree)
    rows = zip(plan.rows, leaves, strict=True)
    return plan.treedef.unflatten(None if row.frozen else leaf for row, leaf in rows)


def apply_updates(plan: Plan, params: PyTree, updates: PyTree) -> PyTree:
    """`optax.apply_updates` that leaves frozen parameters as they are.

    Args:
      plan: From `fully_shard`.
      params: All parameters.
      updates: From `tx.update`, None where frozen.
    """
    params = unpack(params)
    new = jax.tree.leaves(optax.apply_updates(trainable(plan, params), updates))
    given = iter(new)
    leaves = plan.treedef.flatten_up_to(params)
    rows = zip(plan.rows, leaves, strict=True)
    return plan.treedef.unflatten(
        leaf if row.frozen else next(given) for row, leaf in rows
    )
