"""A composition on one device, in jax and optax alone."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from composition.composed_loss import (
    BUILDERS,
    STEPS,
    Ran,
    bound_key,
    is_frozen,
    loss_of,
    merge,
    model_of,
    rows_of,
    split,
)
from composition.composed_models import Built, Tools
from composition.composed_optimizers import optimizer_of
from composition.compositions import POLICIES, Composition
from flax import nnx

import fsdp_jax as fsdp


def run_plainly(case: Composition) -> Ran:
    """The case with jax and optax alone."""
    built = BUILDERS[case.framework](case, Tools(lambda fn: fn, scan_plainly), str)
    params, state = jax.jit(lambda: split(case, model_of(built)))()
    frozen = [is_frozen(case, name) for name, _ in fsdp.sharding.named_leaves(params)]
    groups = microbatches(case, case.num_microbatches)
    tx = optax.with_extra_args_support(optimizer_of(case))
    # Compiled for one microbatch, and called for each.
    of_params = _loss_of_params(case, built)
    compute = jax.jit(jax.value_and_grad(of_params, has_aux=True))

    @jax.jit
    def update(params, opt, grads, loss):
        own = _trained(params, frozen)
        updates, opt = tx.update(_trained(grads, frozen), opt, own, value=loss)
        return _with_frozen(optax.apply_updates(own, updates), params, frozen), opt

    opt = jax.jit(tx.init)(_trained(params, frozen))
    seen, losses = [], []
    for _ in range(STEPS):
        loss, aux, state, grads = _grads(case, compute, params, state, groups)
        params, opt = update(params, opt, grads, loss)
        seen.append((aux, grads))
        losses.append(loss)
    aux, grads = seen[0]
    grads = _trained(grads, frozen)
    return Ran(
        first=(losses[0], aux if case.shows_aux else {}),
        grads=grads,
        grads_by_hand=grads if case.by_hand else None,
        losses=losses,
        params=params,
        state=state,
        evaluated=_evaluated(case, built, params, state),
    )


Batch = dict[str, np.ndarray]


def microbatches(case: Composition, num_microbatches: int) -> list[list[Batch]]:
    """Returns the rows of each microbatch: of each rank those that are its own then.

    Returns:
      The parts of each microbatch that are computed apart: one, or where BatchNorm has
      statistics of a rank's own rows, one for each rank.
    """
    num_parts = case.ranks if case.norm == "own" else 1

    def cut(rows):
        by_rank = rows.reshape(case.ranks, num_microbatches, -1, *rows.shape[1:])
        shape = (num_microbatches, num_parts, -1, *rows.shape[1:])
        return by_rank.swapaxes(0, 1).reshape(shape)

    whole = jax.tree.map(cut, rows_of(case))
    return [
        [jax.tree.map(lambda x, i=i, j=j: x[i, j], whole) for j in range(num_parts)]
        for i in range(num_microbatches)
    ]


def _grads(case, compute, params, state, groups):
    """Loss, aux, state and gradients of all microbatches, one after the other."""
    # As many as there are parts, each of which goes on with its own.
    states, outs = [state] * len(groups[0]), []
    for group in groups:
        for i, batch in enumerate(group):
            (value, (count, aux, states[i])), grads = compute(params, states[i], batch)
            outs.append(jax.device_get((value, count, aux, grads)))
    values, counts, auxes, grads = zip(*outs, strict=True)
    mean = functools.partial(_mean, total=sum(counts))
    state = jax.tree.map(_agreed, *states)
    return mean(*values), _joined_aux(case, auxes), state, mean(*grads)


def _evaluated(case: Composition, built: Built, params: Any, state: Any) -> Any:
    """Returns the loss of all rows, in one microbatch; None if it is not asked for."""
    if not case.evaluates:
        return None
    compute = jax.jit(_loss_of_params(case, built))
    (group,) = microbatches(case, 1)
    outs = [jax.device_get(compute(params, state, batch)) for batch in group]
    values = [value for value, _ in outs]
    return _mean(*values, total=sum(count for _, (count, _, _) in outs))


def _loss_of_params(case: Composition, built: Built) -> Callable[..., Any]:
    """`loss(params, state, batch) -> (value, (count, aux, state))`."""
    inner = loss_of(case, built)

    def of_params(params, state, batch):
        # Made again for what is no array in it; its arrays are not used.
        made = None if case.framework in ("plain", "linen") else model_of(built)
        whole = merge(case, made, _cast(case, params), state)
        value, aux, new = inner(whole, batch, bound_key())
        written = split(case, whole if new is None else new)[1]
        if case.framework == "linen":  # It returns what it has written.
            written = {"net": {**state["net"], **written["net"]}}
        value, count = value if case.per_token else (value, 1.0)
        return value, (count, aux, written)

    return of_params


def _agreed(*leaves: Any) -> Any:
    """Returns the mean of statistics; all else is alike."""
    is_mean = len(leaves) > 1 and jnp.issubdtype(leaves[0].dtype, jnp.inexact)
    return np.mean(leaves, 0) if is_mean else leaves[0]


def _mean(*trees, total):
    return jax.tree.map(lambda *leaves: sum(leaves) / total, *trees)


def _joined_aux(case: Composition, auxes: Any) -> Any:
    """Rows in the order of the batch, the mean of scalars, the sum of counts."""

    def join(*leaves):
        if leaves[0].ndim:
            pieces = np.stack(leaves).reshape(case.num_microbatches, case.ranks, -1)
            return pieces.swapaxes(0, 1).reshape(-1)
        is_count = jnp.issubdtype(leaves[0].dtype, jnp.integer)
        return sum(leaves) if is_count else sum(leaves) / len(leaves)

    return jax.tree.map(join, *auxes)


def _cast(case: Composition, params: Any) -> Any:
    dtype = POLICIES[case.policy].get("param_dtype")
    return jax.tree.map(lambda x: x.astype(dtype) if dtype else x, params)


def _trained(tree: Any, frozen: list[bool]) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    pairs = zip(leaves, frozen, strict=True)
    return treedef.unflatten(None if is_frozen else x for x, is_frozen in pairs)


def _with_frozen(new: Any, old: Any, frozen: list[bool]) -> Any:
    given, (leaves, treedef) = iter(jax.tree.leaves(new)), jax.tree.flatten(old)
    pairs = zip(leaves, frozen, strict=True)
    return treedef.unflatten(x if is_frozen else next(given) for x, is_frozen in pairs)


def scan_plainly(unit, stacked, carry, xs=(), *, prefetch=0, unroll=1):
    """The loop over layers in jax alone."""
    del prefetch, unroll
    if not isinstance(stacked, nnx.Module):
        return jax.lax.scan(lambda c, s: unit(s[0], c, *s[1]), carry, (stacked, xs))
    graph, params, state = nnx.split(stacked, nnx.Param, ...)

    def body(carry, slices):
        params, state, xs = slices
        block = nnx.merge(graph, params, state)
        before = jax.tree.leaves(state)
        carry, y = unit(block, carry, *xs)
        written = nnx.split(block, nnx.Param, ...)[2]
        # What nobody has written is not put back: flax would refuse it in a `vmap`.
        is_same = all(map(operator.is_, before, jax.tree.leaves(written)))
        return carry, (y, () if is_same else written)

    carry, (ys, written) = jax.lax.scan(body, carry, (params, state, xs))
    if jax.tree.leaves(written):
        nnx.update(stacked, written)
    return carry, ys
