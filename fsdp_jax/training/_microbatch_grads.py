"""Gradients of microbatches, accumulated and reduced over all ranks.

The last microbatch may run apart from the others, so that its backward overlaps the
deferred reduction.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from fsdp_jax._tree import PyTree
from fsdp_jax.pipeline._gradients import pipelined_grads
from fsdp_jax.sharding._mesh import DATA_AXES, axes_in_use, num_devices
from fsdp_jax.sharding._plan import ROOT, ParamPlan, Plan
from fsdp_jax.step._aux_outputs import AuxFormat, join_aux
from fsdp_jax.step._collectives import accumulated, reduce_deferred
from fsdp_jax.step._loss import trace_gradients, trace_loss
from fsdp_jax.step._shard import GradReduction, Shard
from fsdp_jax.step._sharded_loss import MicrobatchInputs, ShardedLoss

Grads = list[Array | None]
"""One gradient per parameter of the plan; None where the parameter is frozen."""


def accumulate(
    loss: ShardedLoss, inputs: MicrobatchInputs, loss_scale: Array | None
) -> tuple[list[Array], PyTree, Any]:
    """Accumulates gradients over microbatches: a loop, then the peeled last microbatch.

    The last microbatch runs outside of the loop if its backward can overlap the
    deferred reduction, see `_num_looped`:

    | iteration | backward runs on | `grads` afterwards |
    |---|---|---|
    | 0 <= i < looped | `shards` | sums over 0 to i, partial over deferred axes |
    | last, in `finished` | `last` and the sums so far | complete |
    | last, not in `finished` | `last` | sums over all microbatches, still partial |

    Args:
      loss: Loss of a plan.
      inputs: Shards with their gradient buffers, and rows by microbatch.
      loss_scale: Factor on the loss before differentiation; None for 1.

    Returns:
      The gradients of trained parameters, summed over all ranks; the model state; and
      `(totals[microbatches], counts[microbatches], aux)` of this rank.
    """
    plan, call, aux_format = loss
    if plan.mesh.shape["pp"] > 1:
        return pipelined_grads(loss, inputs, loss_scale)
    shards, model_state, rows, key = inputs
    num_microbatches, example = inputs.num_microbatches, inputs.example
    axes = axes_in_use(plan.mesh, plan.mesh.axis_names)
    xs = (jnp.arange(num_microbatches), rows)
    scale = jnp.asarray(1.0 if loss_scale is None else loss_scale)
    # Traced once, on the first microbatch's shapes: the loop and the peeled iteration
    # replay the same jaxprs.
    prefetch = plan.prefetch
    traced, gathers = trace_loss(call, shards, *example, axes=axes, prefetch=prefetch)
    run, once = trace_gradients(
        traced, shards, *example, scale, axes=axes, prefetch=prefetch
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
        x = jax.tree.map(lambda x: x[-1], xs)
        if looped:
            # Its forward depends on nothing of the loop, so XLA may run it before: the
            # activations of two microbatches would be in memory at once. It waits for
            # gradients and not for losses, since XLA inlines a loop of one iteration.
            x, grads = lax.optimization_barrier((x, grads))
        finished = once & _finished_in_backward(plan, gathers)
        last = _finishing(plan, shards, grads if looped else None, finished)
        if finished:
            # Traced again, since shards in `finished` have other grad_buffers.
            traced, _ = trace_loss(call, last, *example, prefetch=prefetch)
            run, _ = trace_gradients(traced, last, *example, scale, prefetch=prefetch)
        new, state, out = backward(run, last, state, x)
        grads = _with_last(plan, grads, new, finished) if looped else new
        outs.append(jax.tree.map(lambda x: x[None], out))
    return _all_reduced(plan, grads, finished), state, _joined(outs)


def _with_last(plan: Plan, grads: Grads, new: Grads, finished: set[str]) -> Grads:
    """Adds the last microbatch's gradients; those of `finished` include the sums."""
    return [
        n if param.name in finished else _plus(param, g, n)
        for param, g, n in zip(plan.params_in_step, grads, new, strict=True)
    ]


def _joined(outs: Sequence[Any]) -> Any:
    """Concatenates what the loop and the last microbatch report, over microbatches."""
    totals, counts, aux = zip(*outs, strict=True)
    return jnp.concatenate(totals), jnp.concatenate(counts), join_aux(list(aux))


def _all_reduced(plan: Plan, grads: Grads, finished: set[str]) -> list[Array]:
    """Runs the deferred reductions of trained parameters, but those of `finished`."""
    data_axes = axes_in_use(plan.mesh, DATA_AXES)
    return [
        # Reduced in the backward pass of the last microbatch already.
        grad
        if param.name in finished
        else reduce_deferred(param, grad, param.deferred_axes(data_axes))
        for param, grad in zip(plan.params_in_step, grads, strict=True)
        if grad is not None
    ]


def _backward(aux_format: AuxFormat, key: Array, scale: Array) -> Callable[..., Any]:
    """Makes `fn(run, shards, state, (index, rows)) -> (grads, state, out)`.

    It runs one microbatch with a function from `trace_gradients`. The gradients are the
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
        if param.num_stacked and not param.is_frozen and gathers.get(param.name) == 1
    }


def _finishing(
    plan: Plan,
    shards: Sequence[Shard],
    accumulated_grad: Grads | None,
    finished: set[str],
) -> list[Shard]:
    """Returns the shards of the last microbatch; its backward completes `finished`."""
    # The deferred reduction is linear, so it runs once, on the sum of all microbatches.
    # Inside the last backward that sum exists where a unit's own gradient is made:
    #
    #     grad = reduce_scatter(own)           over `placements.gradient`, as always
    #     grad = accumulated_grad + grad       the sums of the loop, of this unit alone
    #     grad = reduce_deferred(grad, axes)   overlaps the backward of the unit before
    #
    # The buffers of these shards have the placement of the last line, the optimizer's:
    # their cotangent is the finished gradient, which replaces the sums of the loop.
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


def shards_with_buffers(plan: Plan, values: Sequence[Any], scale: float) -> list[Shard]:
    """Returns the shards of a step, with zeros for the gradients of trained ones.

    Args:
      plan: Plan of the step.
      values: This device's pieces, split as within the step.
      scale: Factor of each gradient before it is reduced.
    """
    return [
        Shard(
            value,
            # Zeros of the gradient's shape: the cotangent of this input is the
            # gradient, so its dtype and sharding can differ from those of the weight.
            None
            if param.is_frozen
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
        (param.split.dim, axes),
        (param.split.expert_dim, ("ep",)),
        (stack, ("pp",)),
    ):
        if dim is not None:
            shape[dim] //= num_devices(plan.mesh, split)
    # Shapes within the step are local to the manual axes; tp is automatic, so that its
    # dim keeps the global size and is constrained below.
    zeros = jnp.zeros(shape, param.precision.main_grads)
    if param.split.tensor_dim is None or not param.is_under_tp:
        return zeros
    spec = PartitionSpec(*(None,) * param.split.tensor_dim, "tp")
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


def _add(plan: Plan, grads: Grads, new: Grads) -> Grads:
    triples = zip(plan.params_in_step, grads, new, strict=True)
    return [_plus(*triple) for triple in triples]


def _plus(param: ParamPlan, grad: Array | None, new: Array | None) -> Array | None:
    return None if grad is None or new is None else accumulated(param, grad, new)
