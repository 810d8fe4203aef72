"""Parameters that are not trained: out of what the optimizer sees, and back."""

from __future__ import annotations

import jax
import optax
from jaxtyping import Array, Key

from fsdp_jax._tree import PyTree
from fsdp_jax.optim._stochastic_rounding import round_stochastically, widened
from fsdp_jax.sharding._padded import unpack
from fsdp_jax.sharding._plan import Plan


def trainable(plan: Plan, tree: PyTree) -> PyTree:
    """What of such a tree the optimizer moves; None in the place of the rest.

    optax passes over None, so `tx.init(trainable(plan, params))` makes no state for
    what is frozen.
    """
    leaves = plan.treedef.flatten_up_to(tree)
    rows = zip(plan.rows, leaves, strict=True)
    return plan.treedef.unflatten(
        leaf if row.is_optimized else None for row, leaf in rows
    )


def overwrite(plan: Plan, params: PyTree, grads: PyTree) -> PyTree:
    """The parameters, with gradients in the place of what these are the next value of.

    Args:
      plan: From `fully_shard`.
      params: All parameters.
      grads: As from `value_and_grad`, plain.
    """
    triples = zip(
        plan.rows,
        plan.treedef.flatten_up_to(params),
        plan.treedef.flatten_up_to(grads),
        strict=True,
    )
    return plan.treedef.unflatten(
        grad if row.is_overwritten else leaf for row, leaf, grad in triples
    )


def seen_by_optimizer(plan: Plan, params: PyTree) -> PyTree:
    """What the optimizer takes for the parameters, arrays or shapes of them.

    That is what it moves. With stochastic rounding it is wide: moments in bfloat16
    would never decay, since 0.999 of one rounds to itself.
    """
    trained = trainable(plan, params)
    if not plan.config.mp_policy.stochastic_rounding:
        return trained
    return jax.tree.map(widened, trained)


def apply_updates(
    plan: Plan,
    params: PyTree,
    updates: PyTree,
    *,
    key: Key[Array, ""] | None = None,
) -> PyTree:
    """`optax.apply_updates` that leaves frozen parameters as they are.

    Args:
      plan: From `fully_shard`.
      params: All parameters.
      updates: From `tx.update`, None where frozen.
      key: For stochastic rounding, another one each step.

    Raises:
      ValueError: If the plan rounds stochastically and there is no key.
    """
    params = unpack(params)
    new = optax.apply_updates(seen_by_optimizer(plan, params), updates)
    if plan.config.mp_policy.stochastic_rounding:
        if key is None:
            raise ValueError(
                "apply_updates(plan, params, updates) under stochastic_rounding=True "
                "draws numbers. Pass key=jax.random.key(...), another one each step."
            )
        new = round_stochastically(new, trainable(plan, params), key)
    given = iter(jax.tree.leaves(new))
    leaves = plan.treedef.flatten_up_to(params)
    rows = zip(plan.rows, leaves, strict=True)
    return plan.treedef.unflatten(
        next(given) if row.is_optimized else leaf for row, leaf in rows
    )


def put_frozen(plan: Plan, params: PyTree, new: PyTree) -> PyTree:
    """The parameters, with those of `new` in the place of what is frozen."""
    pairs = zip(
        plan.rows,
        plan.treedef.flatten_up_to(params),
        plan.treedef.flatten_up_to(new),
        strict=True,
    )
    return plan.treedef.unflatten(b if row.frozen else a for row, a, b in pairs)
