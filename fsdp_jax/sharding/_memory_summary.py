"""Memory summary of a plan: bytes of unsharded weights during a step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from jax.sharding import Mesh

from fsdp_jax._report import format_bytes
from fsdp_jax.sharding._mesh import num_devices
from fsdp_jax.sharding._param_plan import ROOT, ParamPlan


def memory_summary(
    mesh: Mesh, params: Sequence[ParamPlan], decoded: Mapping[str, int]
) -> list[str]:
    """Summary lines for `Plan.__repr__`: bytes of unsharded weights during a step.

    Args:
      mesh: Device mesh of the plan.
      params: Plans of all parameters.
      decoded: Name of a parameter of codes -> bytes of the weight that its unit
        dequantizes.
    """
    always = [param for param in params if _is_always_unsharded(param)]
    size = format_bytes(sum(_unsharded_bytes(mesh, param) for param in always))
    of = " in no unit" if all(param.unit == ROOT for param in always) else ""
    said = f"unsharded during a step: {size}{of}, all the time"
    if len(always) < len(params):
        largest = format_bytes(_largest_unit(mesh, params, decoded))
        said += f"; {largest} in the largest unit, while it runs"
    lines = [said]
    if size := _gathered_at_entry(mesh, params):
        lines.append(
            f"shards gathered from smaller ones before a step: {format_bytes(size)}"
        )
    if line := _not_ahead(mesh, params):
        lines.append(line)
    return lines


def _not_ahead(mesh: Mesh, params: Sequence[ParamPlan]) -> str | None:
    """Says what it costs that units are not gathered ahead; None if they are."""
    split = [
        param
        for param in params
        if not _is_always_unsharded(param) and param.split.dim is not None
    ]
    size = format_bytes(sum(_unsharded_bytes(mesh, param) for param in split))
    if split and not split[0].unit_policy.prefetch:
        return (
            f"units gathered ahead: none (prefetch=0); XLA may hold up to {size} of "
            "unrolled units unsharded, and a scan waits for each gather"
        )
    if split and not split[0].unit_policy.reshard:
        return (
            "units gathered ahead: none in a scan (reshard_after_forward=False), which "
            f"waits for each gather; {size} stay unsharded until backward has used them"
        )
    return None


def _is_always_unsharded(param: ParamPlan) -> bool:
    """Returns whether a parameter is unsharded all through a step.

    It is if it belongs to no unit or is not split as in ZeRO-3.
    """
    return param.unit == ROOT or not param.placements.parameter


@dataclasses.dataclass(frozen=True)
class UnitBytes:
    """Bytes of a plan's largest unit on one device, as communicated.

    Attributes:
      weights: Unsharded weights in compute dtype; 0 if no unit is gathered.
      gradients: Unreduced gradients in the dtype in which they are reduced.
      scattered: Gradients after their reduce-scatter, in that dtype.
    """

    weights: int
    gradients: int
    scattered: int


def unit_bytes(mesh: Mesh, params: Sequence[ParamPlan]) -> UnitBytes:
    """Returns the bytes that the largest unit gathers and reduces at once."""
    weights = _largest_unit(mesh, params, {})
    gradient = max((p.precision.grad_comm.itemsize for p in params), default=1)
    compute = min((p.precision.param.itemsize for p in params), default=1)
    scattered: dict[str, int] = {}
    for param in params:
        if not _is_always_unsharded(param):
            ranks = math.prod(mesh.shape[a] for a in param.placements.gradient)
            size = _unsharded_bytes(mesh, param, param.num_stacked) // ranks
            scattered[param.unit] = scattered.get(param.unit, 0) + size
    return UnitBytes(
        weights,
        weights * gradient // compute,
        max(scattered.values(), default=0) * gradient // compute,
    )


def _largest_unit(
    mesh: Mesh, params: Sequence[ParamPlan], decoded: Mapping[str, int]
) -> int:
    """Returns bytes of the largest unit's unsharded weights in compute dtype.

    One unit of a stack is counted.
    """
    sizes: dict[str, int] = {}
    for param in params:
        if not _is_always_unsharded(param):
            size = _unsharded_bytes(mesh, param, param.num_stacked) + decoded.get(
                param.name, 0
            )
            sizes[param.unit] = sizes.get(param.unit, 0) + size
    return max(sizes.values(), default=0)


def _gathered_at_entry(mesh: Mesh, params: Sequence[ParamPlan]) -> int:
    """Returns bytes of shards that HFSDP gathers from smaller ones before a step."""
    return sum(
        param.num_elements(mesh, param.placements.parameter)
        * param.precision.param.itemsize
        for param in params
        if param.placements.parameter
        and set(param.placements.optimizer) > set(param.placements.parameter)
    )


def _unsharded_bytes(mesh: Mesh, param: ParamPlan, num_stacked: int = 0) -> int:
    """Returns bytes of an unsharded parameter in compute dtype, or of one of a stack.

    Only this rank's experts, part of `tp` and layers of the stage are counted: nothing
    is gathered over these axes.
    """
    experts = mesh.shape["ep"] if param.is_expert else 1
    parts = 1 if param.split.tensor_dim is None else mesh.shape["tp"]
    stages = mesh.shape["pp"] if param.is_staged and not num_stacked else 1
    elements = math.prod(param.shape[num_stacked:]) // experts // parts // stages
    return elements * param.precision.param.itemsize


def padding_bytes(mesh: Mesh, padded: Sequence[ParamPlan]) -> int:
    """Returns bytes on one device beyond an even split of the padded parameters.

    Args:
      mesh: Device mesh of the plan.
      padded: Plans of the padded parameters.
    """
    extra = 0.0
    for param in padded:
        axes = param.placements.optimizer
        even = param.num_elements(mesh, ()) / num_devices(mesh, axes)
        always = param.num_elements(mesh, axes)
        extra += (always - even) * param.precision.main_params.itemsize
    return round(extra)
