"""Pipeline summary of a plan: layers of stages, bubble, gathers, permutation."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jax.sharding import Mesh

from fsdp_jax._report import format_bytes
from fsdp_jax.sharding._config import FSDPConfig
from fsdp_jax.sharding._param_plan import ROOT, ParamPlan
from fsdp_jax.sharding._stages import Schedule, Stages


def pipeline_lines(
    mesh: Mesh, config: FSDPConfig, stages: Stages, params: Sequence[ParamPlan]
) -> list[str]:
    """Summary lines for `Plan.__repr__`: layers, bubble, gathers and permutation.

    Args:
      mesh: Device mesh with more than one device on `pp`.
      config: Configuration of the plan.
      stages: Split of the stack over stages.
      params: Plans of all parameters.
    """
    staged = [param for param in params if param.is_staged]
    layers = " or ".join(dict.fromkeys(map(str, stages.layers_of_stages)))
    lines = [
        f"pipeline, {config.pipeline.schedule}: {stages.num_stages} stages of {layers} "
        f"layers in {stages.num_virtual} chunk(s)",
        _bubbles(stages),
        _gathers(mesh, staged),
    ]
    if others := _other_stacks(params):
        lines.append(f"run besides in the first or the last stage: {', '.join(others)}")
    if stages.padding:
        lines.append(
            f"{stages.num_layers} layers are stored as "
            f"{stages.num_layers + stages.padding}, of which {stages.padding} are "
            "zeros that no stage runs"
        )
    if stages.num_virtual > 1:
        lines.append(
            "layers are stored in their own order and run in another: a device sends "
            f"up to {format_bytes(_permuted_bytes(mesh, staged))} of weights and "
            "gradients over pp each step"
        )
    return lines


def _other_stacks(params: Sequence[ParamPlan]) -> list[str]:
    """Returns the stacks that stages do not split but run before or after theirs."""
    sizes = {
        param.unit: param.shape[0]
        for param in params
        if param.num_stacked and not param.is_staged and param.unit != ROOT
    }
    return [f"{unit} ({size} unit{'s' * (size > 1)})" for unit, size in sizes.items()]


def _bubbles(stages: Stages) -> str:
    """Describes the share of a step in which a stage is idle."""
    told = []
    for rounds in (2, 8):
        schedule = Schedule(stages, rounds * stages.num_stages)
        told.append(
            f"{schedule.bubble:.1%} of a step with {schedule.num_microbatches} "
            "microbatches"
        )
    return f"a stage waits {' and '.join(told)}"


def _gathers(mesh: Mesh, staged: Sequence[ParamPlan]) -> str:
    """Describes how often layers are gathered, and the memory to gather them once."""
    unsharded = sum(
        math.prod(param.split.on_device(mesh, param.padded_shape, ()))
        * param.precision.param.itemsize
        for param in staged
    )
    if any(param.placements.parameter for param in staged):
        return (
            "a stage gathers its layers for each microbatch and direction; with "
            f"zero_dp_strategy=2 once a step, to hold {format_bytes(unsharded)}"
        )
    return f"a stage has its layers unsharded during a step: {format_bytes(unsharded)}"


def _permuted_bytes(mesh: Mesh, staged: Sequence[ParamPlan]) -> int:
    """Returns the most bytes a device sends to permute layers and gradients."""
    total = 0
    for param in staged:
        sent = param.num_elements(mesh, param.placements.parameter)
        total += sent * param.precision.param.itemsize
        if not param.is_frozen:
            sent = param.num_elements(mesh, param.placements.optimizer)
            total += sent * param.precision.main_grads.itemsize
    return total
