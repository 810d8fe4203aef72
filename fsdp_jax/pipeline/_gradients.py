"""Loss and gradients of a rank that runs the layers of one pipeline stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
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
from fsdp_jax.sharding._plan import Plan
from fsdp_jax.sharding._stages import Schedule
from fsdp_jax.step._aux_outputs import AuxFormat, Parts, join_aux
from fsdp_jax.step._collectives import reduce_deferred
from fsdp_jax.step._loss import LossOfShards, trace_and_split
from fsdp_jax.step._shard import Shard

_RUN = {"1f1b": one_forward_one_backward, "gpipe": all_forward_all_backward}


def pipelined_grads(
    plan: Plan,
    call: LossOfShards,
    aux_format: AuxFormat,
    shards: Sequence[Shard],
    model_state: PyTree,
    rows: PyTree,
    key: Array,
    loss_scale: Array | None,
) -> tuple[list[Array], PyTree, Any]:
    """Runs the microbatches of a step through the stages, forward and backward.

    Args:
      plan: Plan of a mesh with several devices on `pp`.
      call: Loss as a function of shards.
      aux_format: Sorter of the loss's auxiliary outputs.
      shards: Shards of all parameters, in plan order.
      model_state: Arrays of the model that are not parameters.
      rows: Batch of this rank, `[microbatches, ...]`.
      key: PRNG key of this rank.
      loss_scale: Factor on the loss before differentiation; None for 1.

    Returns:
      The gradients of the trained parameters, summed over all ranks; the model state;
      and `(totals[microbatches], counts[microbatches], aux)` of this rank.
    """
    stage = _stage(plan, call, aux_format, shards, model_state, rows, key)
    run = _RUN[plan.config.pipeline.schedule]
    scale = 1 if loss_scale is None else loss_scale
    grads, state, (totals, counts, aux) = run(stage, model_state, scale)
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


def pipelined_loss(
    plan: Plan,
    call: LossOfShards,
    aux_format: AuxFormat,
    shards: Sequence[Shard],
    model_state: PyTree,
    batch: PyTree,
    key: Array,
) -> tuple[Array, Array, Parts]:
    """Returns `(total, count, aux)` of this rank's batch, run as a single microbatch.

    Args:
      plan: Plan of a mesh with several devices on `pp`.
      call: Loss as a function of shards.
      aux_format: Sorter of the loss's auxiliary outputs.
      shards: Shards of all parameters, in plan order.
      model_state: Arrays of the model that are not parameters.
      batch: Batch of this rank.
      key: PRNG key of this rank.
    """
    rows = split_microbatches(batch, 1)
    stage = _stage(plan, call, aux_format, shards, model_state, rows, key)
    _, (totals, counts, aux) = forward_pass(stage, model_state)
    return totals.sum(), counts.sum(), join_aux([aux])


def _stage(
    plan: Plan,
    call: LossOfShards,
    aux_format: AuxFormat,
    shards: Sequence[Shard],
    model_state: PyTree,
    rows: PyTree,
    key: Array,
) -> Stage:
    stages = plan.stages
    shards = [
        dataclasses.replace(
            shard, value=permute_layers(shard.param, stages, shard.value)
        )
        if shard.param.is_staged
        else shard
        for shard in shards
    ]
    num_microbatches = jax.tree.leaves(rows)[0].shape[0]
    example = jax.tree.map(lambda x: x[0], rows)
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
    cut = trace_and_split(call, chunk, model_state, example, key, axes=axes)
    schedule = Schedule(stages, num_microbatches)
    return Stage(cut, schedule, shards, rows, key, aux_format)
