"""Partition of the parameters into optimized and other ones, and its inverse."""

from __future__ import annotations

import jax
import optax
from jaxtyping import Array, Key

from fsdp_jax._tree import PyTree
from fsdp_jax.optim._stochastic_rounding import round_stochastically, widened
from fsdp_jax.sharding._ambient_mesh import check_plan
from fsdp_jax.sharding._padded import unpack
from fsdp_jax.sharding._plan import Plan


def trainable(plan: Plan, tree: PyTree) -> PyTree:
    """Replaces leaves that the optimizer does not update by None.

    The tree has the structure of the parameters.

    optax skips None, so `tx.init(trainable(plan, params))` makes no state for frozen
    parameters.

    Args:
      plan: Plan from `fully_shard`.
      tree: Tree in the structure of `plan.params`, e.g. of parameters or of gradients.

    Returns:
      The same tree, with None for frozen parameters and for those whose gradient is
      their next value.

    Examples:
      >>> config = fsdp.FSDPConfig(frozen=("head",))
      >>> plan = fsdp.fully_shard(make_model, mesh, config=config)
      >>> jax.tree.map(jnp.shape, fsdp.trainable(plan, params))
      {'head': None, 'layers': {'w': (2, 16, 16)}}
    """
    check_plan(plan, "trainable")
    leaves = plan.treedef.flatten_up_to(tree)
    pairs = zip(plan.param_plans, leaves, strict=True)
    return plan.treedef.unflatten(
        leaf if param.is_optimized else None for param, leaf in pairs
    )


def overwrite(plan: Plan, params: PyTree, grads: PyTree) -> PyTree:
    """Replaces parameters by gradients that are their next values.

    These are the parameters marked as flax's overwrite_with_gradient, such as fp8
    scales.

    Args:
      plan: Plan from `fully_shard`.
      params: All parameters.
      grads: Gradients from `value_and_grad`, plain arrays.
    """
    triples = zip(
        plan.param_plans,
        plan.treedef.flatten_up_to(params),
        plan.treedef.flatten_up_to(grads),
        strict=True,
    )
    return plan.treedef.unflatten(
        grad if param.is_overwritten else leaf for param, leaf, grad in triples
    )


def seen_by_optimizer(plan: Plan, params: PyTree) -> PyTree:
    """Returns the parameters as the optimizer sees them, arrays or abstract arrays.

    Leaves that it does not update are None. With stochastic rounding the others are
    widened to float32: moments in bfloat16 would never decay, since 0.999 times one
    rounds to itself.
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
    """Applies `optax.apply_updates` to optimized parameters; leaves the rest unchanged.

    Args:
      plan: Plan from `fully_shard`.
      params: All parameters.
      updates: Updates from `tx.update`, None for frozen parameters.
      key: PRNG key of stochastic rounding, a new one each step.

    Raises:
      ValueError: If the plan rounds stochastically and there is no key.
    """
    params = unpack(params)
    new = optax.apply_updates(seen_by_optimizer(plan, params), updates)
    if plan.config.mp_policy.stochastic_rounding:
        if key is None:
            raise ValueError(
                "apply_updates(plan, params, updates) under stochastic_rounding=True "
                "draws random numbers. Pass key=jax.random.key(...), a different one "
                "each step."
            )
        new = round_stochastically(new, trainable(plan, params), key)
    given = iter(jax.tree.leaves(new))
    leaves = plan.treedef.flatten_up_to(params)
    pairs = zip(plan.param_plans, leaves, strict=True)
    return plan.treedef.unflatten(
        next(given) if param.is_optimized else leaf for param, leaf in pairs
    )


def put_frozen(plan: Plan, params: PyTree, new: PyTree) -> PyTree:
    """Returns the parameters with frozen ones taken from `new`."""
    pairs = zip(
        plan.param_plans,
        plan.treedef.flatten_up_to(params),
        plan.treedef.flatten_up_to(new),
        strict=True,
    )
    return plan.treedef.unflatten(b if param.is_frozen else a for param, a, b in pairs)
