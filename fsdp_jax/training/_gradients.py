"""Loss and gradients of one device's rows, reduced over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from fsdp_jax._option_types import is_whole
from fsdp_jax.data._batch import split_microbatches
from fsdp_jax.pipeline._gradients import pipelined_loss
from fsdp_jax.sharding._mesh import DATA_AXES, axes_in_use, num_devices
from fsdp_jax.sharding._plan import ParamPlan, Plan
from fsdp_jax.sharding._precision import at_least_float32
from fsdp_jax.step._aux_outputs import AUX_SPECS, reduce_aux
from fsdp_jax.step._loss import (
    LossFn,
    LossForm,
    trace_loss,
)
from fsdp_jax.step._model_state import fold_rank, reduce_state
from fsdp_jax.step._param_layout import gather_for_step
from fsdp_jax.step._shard import GradReduction, Shard
from fsdp_jax.step._sharded_loss import (
    MicrobatchInputs,
    RankInputs,
    ShardedLoss,
    sharded_loss,
)
from fsdp_jax.step._step_layout import packed, placed
from fsdp_jax.training._microbatch_grads import accumulate, shards_with_buffers


def global_loss(plan: Plan, loss_fn: LossFn, form: LossForm) -> Callable[..., Any]:
    """Makes `fn(params, batch, key, model_state) -> (loss, aux)` on global arrays."""
    loss = sharded_loss(plan, loss_fn, form)
    data_axes = axes_in_use(plan.mesh, DATA_AXES)

    def local(values, batch, key, model_state):
        values = gather_for_step(plan.params_in_step, values)
        shards = [
            Shard(value, None, None, param, GradReduction())
            for param, value in zip(plan.params_in_step, values, strict=True)
        ]
        inputs = RankInputs(shards, model_state, batch, fold_rank(key, data_axes))
        if plan.mesh.shape["pp"] > 1:
            total, count, parts = pipelined_loss(loss, inputs)
        else:
            axes = axes_in_use(plan.mesh, plan.mesh.axis_names)
            prefetch = plan.prefetch
            traced, _ = trace_loss(loss.call, *inputs, axes=axes, prefetch=prefetch)
            total, (count, aux, _) = traced(*inputs)
            parts = loss.aux_format.take_apart(aux)
        mean = _sum(total, data_axes) / _at_least_one(_sum(count, data_axes))
        return mean, reduce_aux(parts, data_axes)

    sharded = _over_mesh(plan, local, out_specs=(PartitionSpec(), AUX_SPECS))

    def fn(params, batch, key, model_state):
        mean, aux = sharded(packed(plan, params), batch, key, model_state)
        return mean, loss.aux_format.put_together(aux)

    return fn


def global_grads(
    plan: Plan,
    loss_fn: LossFn,
    form: LossForm,
    num_microbatches: int,
    *,
    with_peaks: bool = False,
) -> Callable[..., Any]:
    """Makes `fn(params, batch, key, model_state, loss_scale=None)`, on global arrays.

    It returns `(((loss, aux), model_state, peaks), grads)`. The gradients are those of
    the loss over the global batch, in the structure of the parameters and packed; None
    for frozen parameters. `peaks` holds their largest magnitudes, `float32[trainable]`,
    infinite where a gradient is not finite; None unless `with_peaks`.
    """
    if not is_whole(num_microbatches) or num_microbatches < 1:
        raise ValueError(
            f"num_microbatches={num_microbatches!r}: a step has a whole number of "
            "microbatches, at least 1."
        )
    loss = sharded_loss(plan, loss_fn, form)
    local = _local_grads(loss, form, num_microbatches, with_peaks=with_peaks)
    trained = [param for param in plan.params_in_step if not param.is_frozen]
    replicated = PartitionSpec()
    grad_specs = [param.spec(param.placements.optimizer) for param in trained]
    sharded = _over_mesh(
        plan,
        local,
        out_specs=((replicated, AUX_SPECS, replicated, replicated), grad_specs),
    )

    def fn(params, batch, key, model_state, loss_scale=None):
        given = (key, loss_scale)
        out, grads = sharded(packed(plan, params), batch, given, model_state)
        mean, aux, new_state, peaks = out
        given = iter(grads)
        stored = [
            None if param.is_frozen else placed(plan, param, next(given))
            for param in plan.param_plans
        ]
        value = ((mean, loss.aux_format.put_together(aux)), new_state, peaks)
        return value, plan.treedef.unflatten(stored)

    return fn


def _local_grads(
    loss: ShardedLoss, form: LossForm, num_microbatches: int, *, with_peaks: bool
) -> Callable[..., Any]:
    """Makes the part of `global_grads` that runs inside `shard_map`.

    It is `fn(values, batch, (key, loss_scale), model_state)`, and returns
    `((loss, aux, model_state, peaks), gradients of trained parameters)`.
    """
    plan, data_axes = loss.plan, axes_in_use(loss.plan.mesh, DATA_AXES)
    num_means = num_devices(plan.mesh, DATA_AXES) * num_microbatches
    trained = [param for param in plan.params_in_step if not param.is_frozen]

    def local(values, batch, given, model_state):
        key, loss_scale = given
        rows = split_microbatches(batch, num_microbatches)
        shards = shards_with_buffers(
            plan, gather_for_step(plan.params_in_step, values), 1 / num_means
        )
        inputs = MicrobatchInputs(shards, model_state, rows, fold_rank(key, data_axes))
        grads, state, outs = accumulate(loss, inputs, loss_scale)
        if loss_scale is not None:
            grads = _all_divided(trained, grads, loss_scale)
        totals, counts, aux = outs
        count = _at_least_one(_sum(counts.sum(), data_axes))
        if form.per_token:
            # Gradients were scaled by `1 / num_means` before the reduction. Dividing by
            # the mean token count per rank and microbatch, known only now, makes that
            # `1 / count`.
            grads = _all_divided(trained, grads, count / num_means)
        mean = _sum(totals.sum(), data_axes) / count
        aux = reduce_aux(aux, data_axes)
        state = reduce_state(plan, model_state, state, data_axes)
        axes = axes_in_use(plan.mesh, ("pp", *DATA_AXES))
        # Gradients are sharded over data axes, and those of stages over pp: the maximum
        # is over all of them, so that every rank takes the same decision to skip.
        peaks = _peaks(grads, axes) if with_peaks else None
        return (mean, aux, state, peaks), grads

    return local


def _over_mesh(plan: Plan, local: Callable[..., Any], out_specs: Any):
    """Applies `shard_map` with the in_specs of a plan to `local`.

    `local` has the arguments `(values, batch, replicated, model_state)`, of which the
    third is a key, or a key and the loss scale.
    """
    replicated = PartitionSpec()
    specs = [param.spec(param.placements.optimizer) for param in plan.params_in_step]

    def sharded(values, batch, key, model_state):
        return jax.shard_map(
            local,
            mesh=plan.mesh,
            in_specs=(specs, plan.batch_specs(batch), replicated, replicated),
            out_specs=out_specs,
            axis_names=plan.manual_axes,
            check_vma=False,
        )(values, batch, key, model_state)

    return sharded


def _peaks(grads: Sequence[Array], axes: tuple[str, ...]) -> Float[Array, " trainable"]:
    """Returns the largest magnitude in each gradient; infinite if any is not finite.

    Infinite instead of NaN, because whether a max reduction propagates NaN depends on
    its implementation.
    """

    def peak(grad):
        size = jnp.abs(grad).astype(jnp.float32)
        return jnp.max(jnp.where(jnp.isfinite(size), size, jnp.inf), initial=0.0)

    peaks = jnp.stack([peak(grad) for grad in grads])
    return lax.pmax(peaks, axes) if axes else peaks


def _all_divided(
    params: Sequence[ParamPlan], grads: Sequence[Array], count: Array
) -> list[Array]:
    pairs = zip(params, grads, strict=True)
    return [g if param.is_overwritten else _divided(g, count) for param, g in pairs]


def _divided(grad: Array, count: Array) -> Array:
    """Divides in float32 at least: bfloat16 cannot represent every integer count."""
    wide = at_least_float32(grad.dtype)
    return (grad.astype(wide) / count.astype(wide)).astype(grad.dtype)


def _sum(x: Array, data_axes: tuple[str, ...]) -> Array:
    return lax.psum(x, data_axes) if data_axes else x


def _at_least_one(count: Array) -> Array:
    """Replaces a count of 0 by 1: a batch without tokens has loss 0, not NaN."""
    return jnp.where(count == 0, jnp.ones_like(count), count)
