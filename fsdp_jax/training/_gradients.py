"""Loss and gradients of one device's rows, reduced over all ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from fsdp_jax._tree import PyTree
from fsdp_jax.data._batch import split_microbatches
from fsdp_jax.pipeline._gradients import pipelined_grads, pipelined_loss
from fsdp_jax.sharding._mesh import DATA_AXES, axes_in_use, num_devices
from fsdp_jax.sharding._plan import ROOT, ParamPlan, Plan
from fsdp_jax.step._aux_outputs import AUX_SPECS, AuxFormat, join_aux, reduce_aux
from fsdp_jax.step._collectives import accumulated, reduce_deferred
from fsdp_jax.step._loss import (
    LossFn,
    LossForm,
    LossOfShards,
    loss_of_shards,
    trace_gradients,
    trace_loss,
)
from fsdp_jax.step._model_state import fold_rank, reduce_state
from fsdp_jax.step._param_layout import gather_for_step
from fsdp_jax.step._shard import GradReduction, Shard
from fsdp_jax.step._step_layout import packed, placed

Grads = list[Array | None]
"""One gradient per parameter of the plan; None where the parameter is frozen."""


def global_loss(plan: Plan, loss_fn: LossFn, form: LossForm) -> Callable[..., Any]:
    """Makes `fn(params, batch, rng, model_state) -> (loss, aux)` on global arrays."""
    call = loss_of_shards(plan, loss_fn, form)
    data_axes = axes_in_use(plan.mesh, DATA_AXES)
    aux_format = AuxFormat(has_whole_rows=plan.mesh.shape["cp"] == 1)

    def local(values, batch, rng, model_state):
        values = gather_for_step(plan.params_in_step, values)
        shards = [
            Shard(value, None, None, param, GradReduction())
            for param, value in zip(plan.params_in_step, values, strict=True)
        ]
        args = (model_state, batch, fold_rank(rng, data_axes))
        if plan.mesh.shape["pp"] > 1:
            total, count, parts = pipelined_loss(plan, call, aux_format, shards, *args)
        else:
            axes = axes_in_use(plan.mesh, plan.mesh.axis_names)
            prefetch = plan.prefetch
            loss, _ = trace_loss(call, shards, *args, axes=axes, prefetch=prefetch)
            total, (count, aux, _) = loss(shards, *args)
            parts = aux_format.take_apart(aux)
        mean = _sum(total, data_axes) / _at_least_one(_sum(count, data_axes))
        return mean, reduce_aux(parts, data_axes)

    sharded = _over_mesh(plan, local, out_specs=(PartitionSpec(), AUX_SPECS))

    def fn(params, batch, rng, model_state):
        loss, aux = sharded(packed(plan, params), batch, rng, model_state)
        return loss, aux_format.put_together(aux)

    return fn


def global_grads(
    plan: Plan,
    loss_fn: LossFn,
    form: LossForm,
    num_microbatches: int,
    *,
    with_peaks: bool = False,
) -> Callable[..., Any]:
    """Makes `fn(params, batch, rng, model_state, loss_scale=None)`, on global arrays.

    It returns `(((loss, aux), model_state, peaks), grads)`. The gradients are those of
    the loss over the global batch, in the structure of the parameters and packed; None
    for frozen parameters. `peaks` holds their largest magnitudes, `float32[trainable]`,
    infinite where a gradient is not finite; None unless `with_peaks`.
    """
    if num_microbatches < 1:
        raise ValueError(
            f"num_microbatches={num_microbatches}: a step has at least 1 microbatch."
        )
    call = loss_of_shards(plan, loss_fn, form)
    data_axes = axes_in_use(plan.mesh, DATA_AXES)
    aux_format = AuxFormat(has_whole_rows=plan.mesh.shape["cp"] == 1)
    num_means = num_devices(plan.mesh, DATA_AXES) * num_microbatches
    trained = [param for param in plan.params_in_step if not param.frozen]

    def local(values, batch, given, model_state):
        rng, loss_scale = given
        rows = split_microbatches(batch, num_microbatches)
        shards = _shards(
            plan, gather_for_step(plan.params_in_step, values), 1 / num_means
        )
        key = fold_rank(rng, data_axes)
        grads, state, outs = _accumulate(
            *(plan, call, aux_format, shards, model_state, rows, key),
            loss_scale,
            num_microbatches,
        )
        if loss_scale is not None:
            grads = _all_divided(trained, grads, loss_scale)
        totals, counts, aux = outs
        count = _at_least_one(_sum(counts.sum(), data_axes))
        if form.per_token:
            # Gradients were scaled by `1 / num_means` before the reduction. Dividing by
            # the mean token count per rank and microbatch, known only now, makes that
            # `1 / count`.
            grads = _all_divided(trained, grads, count / num_means)
        loss = _sum(totals.sum(), data_axes) / count
        aux = reduce_aux(aux, data_axes)
        state = reduce_state(plan, model_state, state, data_axes)
        axes = axes_in_use(plan.mesh, ("pp", *DATA_AXES))
        # Gradients are sharded over data axes, and those of stages over pp: the maximum
        # is over all of them, so that every rank takes the same decision to skip.
        peaks = _peaks(grads, axes) if with_peaks else None
        return (loss, aux, state, peaks), grads

    whole = PartitionSpec()
    grad_specs = [param.spec(param.placements.optimizer) for param in trained]
    sharded = _over_mesh(
        plan, local, out_specs=((whole, AUX_SPECS, whole, whole), grad_specs)
    )

    def fn(params, batch, rng, model_state, loss_scale=None):
        given = (rng, loss_scale)
        out, grads = sharded(packed(plan, params), batch, given, model_state)
        loss, aux, new_state, peaks = out
        given = iter(grads)
        at_rest = [
            None if param.frozen else placed(plan, param, next(given))
            for param in plan.param_plans
        ]
        value = ((loss, aux_format.put_together(aux)), new_state, peaks)
        return value, plan.treedef.unflatten(at_rest)

    return fn


def _accumulate(
    plan: Plan,
    call: LossOfShards,
    aux_format: AuxFormat,
    shards: Sequence[Shard],
    model_state: PyTree,
    rows: PyTree,
    key: Array,
    loss_scale: Array | None,
    num_microbatches: int,
) -> tuple[list[Array], PyTree, Any]:
    """Accumulates gradients over microbatches: a loop, then the peeled last microbatch.

    The last microbatch runs outside of the loop if its backward can overlap the
    deferred reduction, see `_num_looped`:

    | iteration | backward runs on | `grads` afterwards |
    |---|---|---|
    | 0 <= i < looped | `shards` | sums over 0 to i, partial over deferred axes |
    | last, in `finished` | `last` and the sums so far | complete |
    | last, not in `finished` | `last` | sums over all microbatches, still partial |

    Returns:
      The gradients of trained parameters, summed over all ranks; the model state; and
      `(totals[num_microbatches], counts[num_microbatches], aux)` of this rank.
    """
    if plan.mesh.shape["pp"] > 1:
        return pipelined_grads(
            *(plan, call, aux_format, shards, model_state, rows, key, loss_scale)
        )
    data_axes = axes_in_use(plan.mesh, DATA_AXES)
    axes = axes_in_use(plan.mesh, plan.mesh.axis_names)
    xs = (jnp.arange(num_microbatches), rows)
    example = (model_state, jax.tree.map(lambda x: x[0], rows), key)
    scale = jnp.asarray(1.0 if loss_scale is None else loss_scale)
    # Traced once, on the first microbatch's shapes: the loop and the peeled iteration
    # replay the same jaxprs.
    prefetch = plan.prefetch
    loss, gathers = trace_loss(call, shards, *example, axes=axes, prefetch=prefetch)
    run, once = trace_gradients(
        loss, shards, *example, scale, axes=axes, prefetch=prefetch
    )
    backward = _backward(aux_format, key, scale)
    grads: Grads = [shard.grad_buffer for shard in shards]
    state, outs, finished = model_state, [], set()
    looped = _num_looped(plan, num_microbatches)
    if looped:

        def body(carry, x):
            grads, state = carry
            new, state, out = backward(run, shards, state, x)
            return (_add(plan, grads, new), state), out

        first = jax.tree.map(lambda x: x[:looped], xs)
        (grads, state), out = lax.scan(body, (grads, state), first)
        outs.append(out)
    if looped < num_microbatches:
        finished = once & _finished_in_backward(plan, gathers)
        last = _finishing(plan, shards, grads if looped else None, finished)
        if finished:
            # Traced again, since shards in `finished` have other grad_buffers.
            loss, _ = trace_loss(call, last, *example, prefetch=prefetch)
            run, _ = trace_gradients(loss, last, *example, scale, prefetch=prefetch)
        new, state, out = backward(run, last, state, jax.tree.map(lambda x: x[-1], xs))
        # Finished gradients include the earlier sums: the backward pass added them.
        grads = [
            n if param.name in finished or not looped else _plus(param, g, n)
            for param, g, n in zip(plan.params_in_step, grads, new, strict=True)
        ]
        outs.append(jax.tree.map(lambda x: x[None], out))
    # Gradients finished in the backward pass of the last microbatch are reduced
    # already.
    reduced = [
        grad
        if param.name in finished
        else reduce_deferred(param, grad, param.deferred_axes(data_axes))
        for param, grad in zip(plan.params_in_step, grads, strict=True)
        if grad is not None
    ]
    totals, counts, aux = zip(*outs, strict=True)
    out = (jnp.concatenate(totals), jnp.concatenate(counts), join_aux(list(aux)))
    return reduced, state, out


def _backward(aux_format: AuxFormat, key: Array, scale: Array) -> Callable[..., Any]:
    """Makes `fn(run, shards, state, (index, rows)) -> (grads, state, out)`.

    It runs one microbatch with a function from `gradients_of`. The gradients are the
    cotangents of each shard's `grad_buffer`: those of the loss times `scale`.
    """

    def backward(run, shards, state, x):
        index, rows = x
        shards = _not_before(shards, rows)
        # Per microbatch, as fold_rank is per rank: no dropout mask is drawn twice.
        own_key = jax.random.fold_in(key, index)
        grads, total, count, aux, state = run(shards, state, rows, own_key, scale)
        return grads, state, (total, count, aux_format.take_apart(aux))

    return backward


def _num_looped(plan: Plan, num_microbatches: int) -> int:
    """Returns the number of microbatches in the loop: all, or all but the last."""
    if num_microbatches == 1:
        return 0
    is_peeled = plan.config.overlap_outer and bool(plan.deferred_axes)
    return num_microbatches - 1 if is_peeled else num_microbatches


def _finished_in_backward(plan: Plan, gathers: dict[str, int]) -> set[str]:
    """Returns the names of parameters whose gradients the last backward can reduce.

    It reduces them unit by unit. They are parameters of stacks: a reduction that is to
    overlap a loop over layers must be part of that loop, whereas the gradient of any
    other unit is ready when its backward ends. The stack must be gathered exactly once,
    since each gather adds the gradient accumulated over earlier microbatches.
    """
    if not (plan.config.overlap_outer and plan.deferred_axes):
        return set()
    return {
        param.name
        for param in plan.params_in_step
        if param.num_stacked and not param.frozen and gathers.get(param.name) == 1
    }


def _finishing(
    plan: Plan,
    shards: Sequence[Shard],
    accumulated_grad: Grads | None,
    finished: set[str],
) -> list[Shard]:
    """Returns the shards of the last microbatch; its backward completes `finished`."""
    data_axes = axes_in_use(plan.mesh, DATA_AXES)
    finishing = []
    for i, shard in enumerate(shards):
        param = shard.param
        if param.name in finished:
            reduction = GradReduction(
                shard.reduction.scale, param.deferred_axes(data_axes)
            )
            shard = dataclasses.replace(
                shard,
                grad_buffer=_grad_buffer(plan, param, param.placements.optimizer),
                accumulated_grad=accumulated_grad[i] if accumulated_grad else None,
                reduction=reduction,
            )
        finishing.append(shard)
    return finishing


def _shards(plan: Plan, values: Sequence[Any], scale: float) -> list[Shard]:
    return [
        Shard(
            value,
            # Zeros of the gradient's shape: the cotangent of this input is the
            # gradient, so its dtype and sharding can differ from those of the weight.
            None
            if param.frozen
            else _grad_buffer(plan, param, param.placements.gradient),
            None,
            param,
            GradReduction(scale),
        )
        for param, value in zip(plan.params_in_step, values, strict=True)
    ]


def _grad_buffer(plan: Plan, param: ParamPlan, axes: tuple[str, ...]) -> Array:
    """Returns zeros in the shape and dtype of a gradient sharded over `axes`."""
    shape = list(param.padded_shape)
    stack = 0 if param.is_staged else None
    for dim, split in (
        (param.dim, axes),
        (param.expert_dim, ("ep",)),
        (stack, ("pp",)),
    ):
        if dim is not None:
            shape[dim] //= num_devices(plan.mesh, split)
    # Shapes within the step are local to the manual axes; tp is automatic, so that its
    # dim keeps the global size and is constrained below.
    zeros = jnp.zeros(shape, param.precision.main_grads)
    if param.tensor_dim is None or not param.is_under_tp:
        return zeros
    spec = PartitionSpec(*(None,) * param.tensor_dim, "tp")
    return lax.with_sharding_constraint(zeros, spec)


def _not_before(shards: Sequence[Shard], rows: PyTree) -> list[Shard]:
    """Ties the shards of units to a microbatch's rows with an optimization barrier.

    Gathering the shards does not depend on the rows, so XLA may hoist it out of the
    loop over microbatches (on CPUs it does), and the unsharded weights of all units
    would stay in memory.
    """
    in_units = [shard.value for shard in shards if shard.param.unit != ROOT]
    in_units, _ = lax.optimization_barrier((in_units, rows))
    tied = iter(in_units)
    return [
        shard
        if shard.param.unit == ROOT
        else dataclasses.replace(shard, value=next(tied))
        for shard in shards
    ]


def _over_mesh(plan: Plan, local: Callable[..., Any], out_specs: Any):
    """Applies `shard_map` with the in_specs of a plan to `local`.

    `local` has the arguments `(values, batch, rng, model_state)`.
    """
    whole = PartitionSpec()
    specs = [param.spec(param.placements.optimizer) for param in plan.params_in_step]

    def sharded(values, batch, rng, model_state):
        return jax.shard_map(
            local,
            mesh=plan.mesh,
            in_specs=(specs, plan.batch_specs(batch), whole, whole),
            out_specs=out_specs,
            axis_names=plan.manual_axes,
            check_vma=False,
        )(values, batch, rng, model_state)

    return sharded


def _add(plan: Plan, grads: Grads, new: Grads) -> Grads:
    triples = zip(plan.params_in_step, grads, new, strict=True)
    return [_plus(*triple) for triple in triples]


def _plus(param: ParamPlan, grad: Array | None, new: Array | None) -> Array | None:
    return None if grad is None or new is None else accumulated(param, grad, new)


def _peaks(
    grads: Sequence[Array], data_axes: tuple[str, ...]
) -> Float[Array, " trainable"]:
    """Returns the largest magnitude in each gradient; infinite if any is not finite.

    Infinite instead of NaN, because whether a max reduction propagates NaN depends on
    its implementation.
    """

    def peak(grad):
        size = jnp.abs(grad).astype(jnp.float32)
        return jnp.max(jnp.where(jnp.isfinite(size), size, jnp.inf), initial=0.0)

    peaks = jnp.stack([peak(grad) for grad in grads])
    return lax.pmax(peaks, data_axes) if data_axes else peaks


def _all_divided(
    params: Sequence[ParamPlan], grads: Sequence[Array], count: Array
) -> list[Array]:
    pairs = zip(params, grads, strict=True)
    return [
        g if param.overwrite_with_gradient else _divided(g, count) for param, g in pairs
    ]


def _divided(grad: Array, count: Array) -> Array:
    """Divides in float32 at least.

    float16 overflows above 65,504, and bfloat16 cannot represent every integer count.
    """
    wide = jnp.promote_types(grad.dtype, jnp.float32)
    return (grad.astype(wide) / count.astype(wide)).astype(grad.dtype)


def _sum(x: Array, data_axes: tuple[str, ...]) -> Array:
    return lax.psum(x, data_axes) if data_axes else x


def _at_least_one(count: Array) -> Array:
    """Replaces a count of 0 by 1: a batch without tokens has loss 0, not NaN."""
    return jnp.where(count == 0, jnp.ones_like(count), count)
