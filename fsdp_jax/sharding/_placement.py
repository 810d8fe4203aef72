"""Placements of parameters: data axes of the strategies, and pipeline stages."""

from __future__ import annotations

import dataclasses

from jax.sharding import Mesh

from fsdp_jax.sharding._config import ZERO_DP_STRATEGIES, FSDPConfig, Placements
from fsdp_jax.sharding._mesh import DATA_AXES, OUTER_AXES, SHARD_AXES, axes_in_use
from fsdp_jax.sharding._param_plan import ROOT, WHOLE
from fsdp_jax.sharding._units import Found


def placements_of(mesh: Mesh, config: FSDPConfig) -> Placements:
    """Returns the user's placements or the preset of the strategies.

    Axes of one device are left out.

    Args:
      mesh: Device mesh.
      config: Placements, or strategies.

    Raises:
      ValueError: If an axis is not a data axis, or the axes of a placement are not a
        prefix of the optimizer's.
    """
    if given := config.placements:
        stations = dataclasses.asdict(given)
        unknown = {a for axes in stations.values() for a in axes} - set(DATA_AXES)
        if unknown:
            raise ValueError(
                f"{given} names {', '.join(sorted(unknown))}. Parameters are split "
                f"over data axes: {', '.join(DATA_AXES)}."
            )
        used = {name: axes_in_use(mesh, axes) for name, axes in stations.items()}
        optimizer = used["optimizer"]
        wrong = [
            name
            for name, axes in used.items()
            if axes != optimizer[: len(axes)] or len(set(axes)) < len(axes)
        ]
        if wrong:
            raise ValueError(
                f"{given}: the axes of {' and '.join(wrong)} are not the first ones of "
                f"optimizer={optimizer}, each once, so that a device's pieces would "
                "not be neighbours. Reorder or extend the optimizer's."
            )
        return Placements(**used)
    inner = axes_in_use(mesh, SHARD_AXES)
    outer = axes_in_use(mesh, OUTER_AXES)
    strategy = ZERO_DP_STRATEGIES.index(str(config.zero_dp_strategy))
    hybrid = config.outer_dp_sharding_strategy == "optim"
    return Placements(
        parameter=inner if strategy >= 3 else (),
        gradient=inner if strategy >= 2 else (),
        # Inner axes first, so that the outer gather concatenates contiguous pieces.
        optimizer=(inner if strategy >= 1 else ()) + (outer if hybrid else ()),
    )


def staged_stack(mesh: Mesh, units: Found, chosen: str | None) -> str | None:
    """Returns the unit or path of the stack that `pp` splits; None if `pp` is 1.

    Args:
      mesh: Device mesh.
      units: Path of a unit -> its number of stacked dims.
      chosen: Path of the stack that the user names, or of several that one scan runs
        a period at a time; None for the only one.

    Raises:
      ValueError: If there is no stack, there are several and none is chosen, or the
        chosen one does not exist.
    """
    pp = mesh.shape["pp"]
    if pp == 1:
        return None
    stacks = [unit for unit, dims in units.items() if dims]
    outer = [unit for unit in stacks if not any(is_within(unit, s) for s in stacks)]
    found = [unit for unit in outer if chosen in (None, unit)]
    if len(found) == 1 and units[found[0]] == 1:
        return found[0] or WHOLE
    inside = [unit for unit in outer if chosen and is_within(unit, chosen)]
    if inside and all(units[unit] == 1 for unit in inside):
        return chosen
    shown = ", ".join(f"'{unit}' of {units[unit]} dim(s)" for unit in outer)
    said = f", and PipelineConfig(stack='{chosen}') chooses one" if chosen else ""
    if len(outer) > 1:
        fix = (
            "Choose one by fsdp_jax.PipelineConfig(stack=...): the others run in the "
            "first or the last stage, before or after it"
        )
    else:
        fix = "Pass units=[fsdp_jax.Stacked(...)] or a class under vmap"
    raise ValueError(
        f"Pipeline parallelism (pp={pp}{said}) needs one stack of units with one "
        f"leading dim, run by fsdp.scan; the model has {shown or 'none'}. {fix}, or "
        "give these devices to dp_shard."
    )


def is_within(unit: str, outer: str) -> bool:
    """Returns whether `unit` lies inside `outer`; False if they are the same."""
    return unit.startswith(f"{outer}.")


def beside_stages(placements: Placements, unit: str) -> Placements:
    """Returns the placements of a parameter outside the stack: `pp` splits it too.

    A parameter of no unit is gathered once a step and not once a microbatch: the first
    and the last stage need it unsharded in any case, and all stages run one program.

    Args:
      placements: Placements without a pipeline.
      unit: Unit of the parameter.
    """
    stored = placements.optimizer
    return Placements(
        parameter=() if unit == ROOT else placements.parameter,
        gradient=placements.gradient,
        # Only if stored arrays are split at all: ZeRO-0 replicates them.
        optimizer=(*stored, "pp") if stored else (),
    )
