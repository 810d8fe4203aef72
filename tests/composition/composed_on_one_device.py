"""A composition on one device, in jax and optax alone."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from composition.composed_loss import (
    BUILDERS,
    STEPS,
    Ran,
    is_frozen,
    loss_of,
    merge,
    model_of,
    optimizer_of,
    rows_of,
    split,
)
from composition.composed_models import Tools
from composition.compositions import Composition
from flax import nnx

import fsdp_jax as fsdp


def run_plainly(case: Composition) -> Ran:
    """The case with jax and optax alone."""
    built = BUILDERS[case.framework](case, Tools(lambda fn: fn, scan_plainly), str)
    params, state = jax.jit(lambda: split(case, model_of(built)))()
    frozen = [is_frozen(case, name) for name, _ in fsdp.sharding.named_leaves(params)]
    groups, tx = microbatches(case), optimizer_of(case)
    compute = jax.jit(functools.partial(_grads, case, built))

    @jax.jit
    def update(params, opt, grads):
        own = _trained(params, frozen)
        updates, opt = tx.update(_trained(grads, frozen), opt, own)
        return _with_frozen(optax.apply_updates(own, updates), params, frozen), opt

    opt = tx.init(_trained(params, frozen))
    seen, losses = [], []
    for _ in range(STEPS):
        loss, aux, state, grads = compute(params, state, groups)
        params, opt = update(params, opt, grads)
        seen.append((aux, grads))
        losses.append(loss)
    aux, grads = seen[0]
    grads = _trained(grads, frozen)
    return Ran((losses[0], aux), grads, losses, params, state)


def microbatches(case: Composition) -> list[dict[str, np.ndarray]]:
    """Rows of each microbatch: of each rank those that are its own then."""

    def cut(rows):
        parts = rows.reshape(
            case.ranks, case.num_microbatches, case.rows_a_rank, *rows.shape[1:]
        )
        return parts.swapaxes(0, 1).reshape(case.num_microbatches, -1, *rows.shape[1:])

    whole = jax.tree.map(cut, rows_of(case))
    return [
        jax.tree.map(lambda x, i=i: x[i], whole) for i in range(case.num_microbatches)
    ]


def _grads(case, built, params, state, groups):
    """Loss, aux, state and gradients of all microbatches, one after the other."""
    inner = loss_of(case, built)

    def of_params(params, state, batch):
        # Made again for what is no array in it; its arrays are not used.
        whole = merge(case, model_of(built), _cast(case, params), state)
        value, aux, new = inner(whole, batch)
        new = split(case, whole if new is None else new)[1]
        value, count = value if case.per_token else (value, 1.0)
        return value, (count, aux, new)

    outs = []
    for batch in groups:
        compute = jax.value_and_grad(of_params, has_aux=True)
        (value, (count, aux, state)), grads = compute(params, state, batch)
        outs.append((value, count, aux, grads))
    values, counts, auxes, grads = zip(*outs, strict=True)
    mean = functools.partial(_mean, total=sum(counts))
    return mean(*values), _joined_aux(case, auxes), state, mean(*grads)


def _mean(*trees, total):
    return jax.tree.map(lambda *leaves: sum(leaves) / total, *trees)


def _joined_aux(case: Composition, auxes: Any) -> Any:
    """Rows in the order of the batch, the mean of scalars, the sum of counts."""

    def join(*leaves):
        if leaves[0].ndim:
            pieces = jnp.stack(leaves).reshape(case.num_microbatches, case.ranks, -1)
            return pieces.swapaxes(0, 1).reshape(-1)
        is_count = jnp.issubdtype(leaves[0].dtype, jnp.integer)
        return sum(leaves) if is_count else sum(leaves) / len(leaves)

    return jax.tree.map(join, *auxes)


def _cast(case: Composition, params: Any) -> Any:
    dtype = None if case.policy == "none" else jnp.dtype(case.policy)
    return jax.tree.map(lambda x: x if dtype is None else x.astype(dtype), params)


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
    graph, state = nnx.split(stacked)

    def body(carry, slices):
        return unit(nnx.merge(graph, slices[0]), carry, *slices[1])

    return jax.lax.scan(body, carry, (state, xs))
