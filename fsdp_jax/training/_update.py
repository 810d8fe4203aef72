"""The optimizer update of a step, on the device or streamed from the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fsdp_jax._tree import PyTree, known_end
from fsdp_jax.sharding._offload import (
    OffloadPolicy,
    optimizer_on_host,
    params_on_host,
)
from fsdp_jax.sharding._padded import pack, unpack
from fsdp_jax.sharding._plan import Plan
from fsdp_jax.step._host_streaming import stream
from fsdp_jax.training._optimizer import abstract_optimizer_state, needs_loss
from fsdp_jax.training._state import TrainState
from fsdp_jax.training._trainable import (
    apply_updates,
    overwrite,
    seen_by_optimizer,
    trainable,
)

Update = Callable[..., tuple[PyTree, PyTree]]
"""`(params, opt_state, grads, skip, key, loss) -> (params, opt_state)`, packed."""


def make_update(
    plan: Plan,
    tx: optax.GradientTransformation,
    abstract: TrainState,
    *,
    may_skip: bool,
) -> Update:
    """Makes the optimizer update of a plan.

    Args:
      plan: Plan from `fully_shard`.
      tx: Optimizer.
      abstract: Abstract state.
      may_skip: Whether the update leaves everything unchanged where `skip` is true.

    Raises:
      ValueError: If a step cannot run the optimizer.
    """
    seen = seen_by_optimizer(plan, plan.params)
    with_loss = needs_loss(tx, seen, abstract_optimizer_state(tx, seen))

    def update(params, opt_state, grads, skip, key, loss):
        plain, grads = unpack(params), unpack(grads)
        # The loss of the global batch, the same on all ranks.
        extra = {"value": loss} if with_loss else {}
        updates, new_state = tx.update(
            trainable(plan, grads),
            unpack(opt_state),
            seen_by_optimizer(plan, plain),
            **extra,
        )
        moved = apply_updates(plan, plain, updates, key=key)
        new = (
            pack(overwrite(plan, moved, grads), abstract.params),
            in_dtypes_of(abstract.opt_state, pack(new_state, abstract.opt_state)),
        )
        return unless(skip, (params, opt_state), new) if may_skip else new

    return (
        _streamed(plan, update, plan.config.offload, abstract)
        if plan.config.offload
        else update
    )


def to_stored(plan: Plan, abstract: TrainState, params: PyTree) -> PyTree:
    """Returns plain parameters in their stored layout: padded, offloaded to host."""
    packed, offload = pack(params, abstract.params), plan.config.offload
    if not (offload and offload.params):
        return packed
    host = jax.memory.Space.Host
    return jax.tree.map(
        lambda x: jax.device_put(x, host) if offload.moves(x) else x, packed
    )


def in_dtypes_of(abstract: PyTree, tree: PyTree) -> PyTree:
    """Casts each array to its dtype in `abstract`.

    A moment that widened with the gradient would recompile the second step, and its
    checkpoint would not load.
    """
    return jax.tree.map(lambda leaf, new: new.astype(leaf.dtype), abstract, tree)


def unless(is_bad: Any, old: PyTree, new: PyTree) -> PyTree:
    """Selects the new arrays, or the old ones where `is_bad`."""
    return jax.tree.map(lambda o, n: jnp.where(is_bad, o, n), old, new)


def _streamed(
    plan: Plan, update: Update, offload: OffloadPolicy, abstract: TrainState
) -> Update:
    """Wraps the update of a state that is partly stored on the host."""
    abstracts = (abstract.params, abstract.opt_state)
    flags = (
        params_on_host(offload, abstract.params),
        optimizer_on_host(offload, abstract.opt_state),
    )

    def streamed(params, opt_state, *others):
        given = (params, opt_state, *others)
        grads, *_ = others
        here = jax.tree.map(lambda _: False, others)
        stacks = _stacks(plan, abstract.params, (params, opt_state, *others))
        # Nothing is fetched before the gradients exist, so that no optimizer state
        # occupies device memory during the backward pass.
        options = {"order": _by_parameter(abstracts), "after": grads}
        return stream(update, given, (*flags, *here), flags, stacks=stacks, **options)

    return streamed


def _stacks(plan: Plan, params: PyTree, tree: PyTree) -> PyTree:
    """Returns whether each array belongs to a stack that is streamed by layer.

    Args:
      plan: Plan of the step.
      params: Abstract parameters.
      tree: Trees whose paths end in those of parameters, as gradients and moments do.
    """
    paths, _ = jax.tree_util.tree_flatten_with_path(params)
    shapes = {
        path: leaf.shape
        for (path, leaf), param in zip(paths, plan.param_plans, strict=True)
        # The layers of a padded stack cannot be told from its padding.
        if param.is_streamed and not param.is_padded
    }

    def is_stack(path, leaf):
        return shapes.get(known_end(path, shapes)) == leaf.shape

    return jax.tree_util.tree_map_with_path(is_stack, tree)


def _by_parameter(abstracts: tuple[PyTree, PyTree]) -> list[list[int]]:
    """Returns leaf indices of both trees: a group for each parameter, then others."""
    params, _ = jax.tree_util.tree_flatten_with_path(abstracts[0])
    rank = {path: i for i, (path, _) in enumerate(params)}
    flat, _ = jax.tree_util.tree_flatten_with_path(abstracts)

    groups: dict[int, list[int]] = {i: [] for i in range(len(rank))}
    for i, (path, _) in enumerate(flat):
        groups.setdefault(rank.get(known_end(path, rank), len(rank)), []).append(i)
    return list(groups.values())
