"""Which parameters are split over the stages of a pipeline, and how all others rest."""

from __future__ import annotations

from jax.sharding import Mesh

from fsdp_jax.sharding._config import Placements
from fsdp_jax.sharding._plan import ROOT
from fsdp_jax.sharding._units import Found


def staged_stack(mesh: Mesh, units: Found, chosen: str | None) -> str | None:
    """The path of the stack that `pp` splits; None on a mesh of one stage.

    Args:
      mesh: The mesh.
      units: Those of the model.
      chosen: What the user calls it; None for the only one.

    Raises:
      ValueError: If there is none, or several and none is chosen, or no such one.
    """
    pp = mesh.shape["pp"]
    if pp == 1:
        return None
    stacks = [unit for unit, dims in units.items() if dims]
    outer = [unit for unit in stacks if not any(is_within(unit, s) for s in stacks)]
    found = [unit for unit in outer if chosen in (None, unit)]
    if len(found) == 1 and units[found[0]] == 1:
        return found[0]
    shown = ", ".join(f"'{unit}' of {units[unit]} dim(s)" for unit in outer)
    said = f", and Pipeline(stack='{chosen}') chooses one" if chosen else ""
    if len(outer) > 1:
        fix = (
            "Choose by fsdp_jax.Pipeline(stack=...): the others run in its first or "
            "last stage, before or behind it"
        )
    else:
        fix = "Pass units=[fsdp_jax.Stacked(...)] or a class under vmap"
    raise ValueError(
        f"The mesh has pp={pp}{said}; stages split one stack of units with one leading "
        f"dim, run by fsdp.scan, and the model has {shown or 'none'}. {fix}, or give "
        "these devices to dp_shard."
    )


def is_within(unit: str, outer: str) -> bool:
    """Whether `unit` is in `outer`, and not the same."""
    return unit.startswith(f"{outer}.")


def beside_stages(placements: Placements, unit: str) -> Placements:
    """Where a parameter rests that is in no stage: split over `pp` besides.

    What belongs to no unit is gathered once a step, not once a microbatch: the first
    and the last stage have it whole in any case, and all run one program.

    Args:
      placements: Without a pipeline.
      unit: The parameter's.
    """
    at_rest = placements.optimizer
    return Placements(
        parameter=() if unit == ROOT else placements.parameter,
        gradient=placements.gradient,
        # Only if anything is split at rest: ZeRO-0 is whole everywhere.
        optimizer=(*at_rest, "pp") if at_rest else (),
    )
