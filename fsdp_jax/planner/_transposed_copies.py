"""Counts the copies of stacked weights that XLA keeps for gathers along inner dims.

XLA gathers along the outermost dim in memory. A loop over layers that gathers a slice
along another dim is given the whole stack in that order of dims: a copy in the main
dtype, made before forward and kept until backward has ended.
"""

from __future__ import annotations

import math

from jax.sharding import Mesh

from fsdp_jax.sharding._param_plan import ParamPlan
from fsdp_jax.sharding._plan import Plan


def transposed_bytes(plan: Plan) -> int:
    """Returns the bytes of transposed copies on one device.

    Experts have them if a rank has several of them and their dims are split further,
    and weights whose first dims are split over `tp`. Weights gathered once per step
    have none, nor have those on the host or in a quantized format, of which each step
    makes a copy anyway.

    Args:
      plan: Plan of the step.
    """
    offload = plan.config.offload
    if offload and offload.params:
        return 0
    return sum(
        _bytes_of_copy(plan.mesh, param)
        for param in plan.param_plans
        if param.gather is None
    )


def _bytes_of_copy(mesh: Mesh, param: ParamPlan) -> int:
    dim, placements = param.split.dim, param.placements
    if not param.num_stacked or dim is None or not param.unit_policy.reshard:
        return 0
    if placements.parameter != placements.optimizer:
        return 0
    local = param.split.on_device(mesh, param.padded_shape, placements.optimizer)
    is_outermost = math.prod(local[param.num_stacked : dim]) == 1
    size = math.prod(local) * param.precision.main_params.itemsize
    return 0 if is_outermost else size
