"""Loss and gradients of a rank that runs the layers of one pipeline stage."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxtyping import Array

from fsdp_jax._tree import PyTree
from fsdp_jax.data._batch import split_microbatches
from fsdp_jax.pipeline._layer_permute import permute_layers, restore_layers
from fsdp_jax.pipeline._schedules import (
    all_forward_all_backward,
    forward_pass,
    one_forward_one_backward,
)
from fsdp_jax.pipeline._stage import Stage, part_of
from fsdp_jax.sharding._mesh import DATA_AXES, axes_in_use
from fsdp_jax.sharding._stages import Schedule
from fsdp_jax.step._aux_outputs import Parts, join_aux
from fsdp_jax.step._collectives import reduce_deferred
from fsdp_jax.step._loss import trace_and_split
from fsdp_jax.step._sharded_loss import MicrobatchInputs, RankInputs, ShardedLoss

_RUN = {"1f1b": one_forward_one_backward, "gpipe": all_forward_all_backward}


def pipelined_grads(
    loss: ShardedLoss, inputs: MicrobatchInputs, loss_scale: Array | None
) -> tuple[list[Array], PyTree, Any]:
    """Runs the microbatches of a step through the stages, forward and backward.

    Args:
      loss: Loss of a plan whose mesh has several devices on `pp`.
      inputs: Shards with their gradient buffers, and rows by microbatch.
      loss_scale: Factor on the loss before differentiation; None for 1.

    Returns:
      The gradients of the trained parameters, summed over all ranks; the model state;
      and `(totals[microbatches], counts[microbatches], aux)` of this rank.
    """
    plan = loss.plan
    run = _RUN[plan.config.pipeline.schedule]
    scale = 1 if loss_scale is None else loss_scale
    out = run(_stage(loss, inputs), inputs.model_state, scale)
    grads, state, (totals, counts, aux) = out
    axes = axes_in_use(plan.mesh, ("pp", *DATA_AXES))
    reduced = []
    for param, grad in zip(plan.params_in_step, grads, strict=True):
        if grad is not None:
            grad = reduce_deferred(param, grad, param.deferred_axes(axes))
            if param.is_staged:
                # After the reduction: only the gradient's shard is permuted.
                grad = restore_layers(param, plan.stages, grad)
            reduced.append(grad)
    return reduced, state, (totals, counts, join_aux([aux]))


def pipelined_loss(loss: ShardedLoss, inputs: RankInputs) -> tuple[Array, Array, Parts]:
    """Returns `(total, count, aux)` of this rank's batch, run as a single microbatch.

    Args:
      loss: Loss of a plan whose mesh has several devices on `pp`.
      inputs: Shards without gradient buffers, and the rows of one microbatch.
    """
    shards, model_state, rows, key = inputs
    one = MicrobatchInputs(shards, model_state, split_microbatches(rows, 1), key)
    _, (totals, counts, aux) = forward_pass(_stage(loss, one), model_state)
    return totals.sum(), counts.sum(), join_aux([aux])


def _stage(loss: ShardedLoss, inputs: MicrobatchInputs) -> Stage:
    plan, stages = loss.plan, loss.plan.stages
    shards = [
        dataclasses.replace(
            shard, value=permute_layers(shard.param, stages, shard.value)
        )
        if shard.param.is_staged
        else shard
        for shard in inputs.shards
    ]
    # The loss is traced once, on the shapes of one chunk and one microbatch; `Stage`
    # calls the parts of that trace with the leaves of other chunks and microbatches.
    chunk = [
        dataclasses.replace(
            shard,
            value=part_of(stages, shard.value, 0),
            grad_buffer=part_of(stages, shard.grad_buffer, 0),
        )
        if shard.param.is_staged
        else shard
        for shard in shards
    ]
    axes = axes_in_use(plan.mesh, plan.mesh.axis_names)
    cut = trace_and_split(loss.call, chunk, *inputs.example, axes=axes)
    schedule = Schedule(stages, inputs.num_microbatches)
    stage = Stage(
        cut, schedule, shards, inputs.microbatches, inputs.key, loss.aux_format
    )
    return stage.with_early_state(inputs.model_state)
