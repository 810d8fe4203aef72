"""Which offloaded weights units copy from the host themselves, one unit at a time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jax.sharding import Mesh

from fsdp_jax._report import format_bytes
from fsdp_jax.sharding._config import FSDPConfig
from fsdp_jax.sharding._param_plan import ParamPlan


def streams(config: FSDPConfig) -> bool:
    """Returns whether a config streams the weights of stacked units from the host."""
    return config.offload is not None and config.offload.stream_params


def streamed(
    config: FSDPConfig, mesh: Mesh, params: Sequence[ParamPlan]
) -> tuple[ParamPlan, ...]:
    """Marks the parameters that a step copies from the host one unit at a time.

    Args:
      config: Config of the plan.
      mesh: Device mesh of the plan.
      params: Plans of all parameters.

    Returns:
      The plans, those of large parameters in stacks of units with `is_streamed` if
      `OffloadPolicy(stream_params=True)`.

    Raises:
      ValueError: If the config or the mesh cannot stream, or no parameter is streamed;
        all reasons in one message.
    """
    if not streams(config):
        return tuple(params)
    chosen = [param for param in params if _is_chosen(config, param)]
    problems = [*_of_config(config, mesh), *_of_params(params, chosen)]
    if problems:
        raise ValueError(
            "OffloadPolicy(stream_params=True) cannot be done here; without it weights "
            "are copied to the device when a step begins:\n"
            + "\n".join(f"  {problem}" for problem in problems)
        )
    names = {param.name for param in chosen}
    return tuple(
        dataclasses.replace(param, is_streamed=param.name in names) for param in params
    )


def streaming_line(mesh: Mesh, params: Sequence[ParamPlan]) -> list[str]:
    """Summary line for `Plan.__repr__`: bytes that stay on the host during a step."""
    if not (own := [param for param in params if param.is_streamed]):
        return []
    units: dict[str, int] = {}
    for param in own:
        one = param.stored_bytes(mesh) // param.shape[0]
        units[param.unit] = units.get(param.unit, 0) + one
    size, largest = streamed_bytes(mesh, params), max(units.values())
    return [
        f"streamed from the host: {format_bytes(size)} of {len(own)} parameters, a "
        f"unit at a time, forward and backward; {format_bytes(largest)} in the largest"
    ]


def streamed_bytes(mesh: Mesh, params: Sequence[ParamPlan]) -> int:
    """Returns bytes of streamed parameters as stored, for one device."""
    return sum(param.stored_bytes(mesh) for param in params if param.is_streamed)


def _is_chosen(config: FSDPConfig, param: ParamPlan) -> bool:
    assert config.offload is not None
    is_large = math.prod(param.padded_shape) >= config.offload.min_elements
    return param.num_stacked == 1 and is_large


def _of_config(config: FSDPConfig, mesh: Mesh) -> list[str]:
    """Returns what of the config and the mesh does not go with streaming."""
    problems = [
        f"mesh axis {axis}={mesh.shape[axis]}: {why}. Use {axis}=1"
        for axis, why in (
            ("pp", "stages run their layers without the loop that streams"),
            ("tp", "XLA partitions the weights itself, and would do it on the host"),
        )
        if mesh.shape[axis] > 1
    ]
    if not config.prefetch:
        problems.append(
            "FSDPConfig(prefetch=0): a unit is copied ahead as it is gathered ahead. "
            "Use prefetch=1"
        )
    if not config.reshard_after_forward:
        problems.append(
            "FSDPConfig(reshard_after_forward=False) keeps all weights on the device. "
            "Use True"
        )
    return problems


def _of_params(params: Sequence[ParamPlan], chosen: Sequence[ParamPlan]) -> list[str]:
    """Returns what of the parameters does not go with streaming."""
    problems = []
    if not chosen:
        units = ", ".join(dict.fromkeys(param.unit for param in params))
        problems.append(
            "no parameter of at least OffloadPolicy(min_elements=) elements is in a "
            f"stack of units with one leading dim; units are {units}. Stack the layers "
            "and run them by fsdp.scan, units=[fsdp.Stacked(...)]"
        )
    if quantized := [param.name for param in chosen if param.gather]:
        problems.append(
            f"param_gather quantizes all units when a step begins: {_few(quantized)}. "
            "Drop MixedPrecisionPolicy(param_gather=)"
        )
    again = [
        param.name
        for param in chosen
        if set(param.placements.optimizer) - set(param.placements.parameter)
    ]
    if again:
        problems.append(
            "weights gathered once a step, over axes that split the optimizer state "
            f"alone: {_few(again)}. Use zero_dp_strategy=3 and "
            "outer_dp_sharding_strategy=0, or placements that are equal"
        )
    return problems


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"
