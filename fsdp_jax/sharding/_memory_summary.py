"""What a plan says of weights that are whole during a step, and when."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from jax.sharding import Mesh

from fsdp_jax._report import format_bytes
from fsdp_jax.sharding._param_plan import ROOT, ParamPlan


def held_lines(
    mesh: Mesh, rows: Sequence[ParamPlan], decoded: Mapping[str, int]
) -> list[str]:
    """The lines.

    Args:
      mesh: Of the plan.
      rows: Of all parameters.
      decoded: By name, bytes that a unit decodes of a parameter that rests in codes.
    """
    held = [row for row in rows if _is_held(row)]
    size = format_bytes(sum(_whole_bytes(mesh, row) for row in held))
    of = " in no unit" if all(row.unit == ROOT for row in held) else ""
    said = f"whole during a step: {size}{of}, all the time"
    if len(held) < len(rows):
        largest = format_bytes(_largest_unit(mesh, rows, decoded))
        said += f"; {largest} in the largest unit, while it runs"
    lines = [said]
    if size := _gathered_at_entry(mesh, rows):
        lines.append(
            f"shards gathered from smaller ones before a step: {format_bytes(size)}"
        )
    return lines


def _is_held(row: ParamPlan) -> bool:
    """Whether a parameter is whole all through a step: of no unit, or not ZeRO-3."""
    return row.unit == ROOT or not row.placements.parameter


def _largest_unit(
    mesh: Mesh, rows: Sequence[ParamPlan], decoded: Mapping[str, int]
) -> int:
    """Bytes of the largest unit's whole weights as computed with, one of a stack."""
    sizes: dict[str, int] = {}
    for row in rows:
        if not _is_held(row):
            size = _whole_bytes(mesh, row, row.num_stacked) + decoded.get(row.name, 0)
            sizes[row.unit] = sizes.get(row.unit, 0) + size
    return max(sizes.values(), default=0)


def _gathered_at_entry(mesh: Mesh, rows: Sequence[ParamPlan]) -> int:
    """Bytes of shards that a step makes of smaller ones before it begins: HFSDP's."""
    return sum(
        row.num_elements(mesh, row.placements.parameter) * row.precision.param.itemsize
        for row in rows
        if row.placements.parameter
        and set(row.placements.optimizer) > set(row.placements.parameter)
    )


def _whole_bytes(mesh: Mesh, row: ParamPlan, num_stacked: int = 0) -> int:
    """Bytes of a parameter as computed with, or of one of a stack.

    Neither other ranks' experts nor other parts of tp are gathered.
    """
    experts = mesh.shape["ep"] if row.is_expert else 1
    parts = 1 if row.tensor_dim is None else mesh.shape["tp"]
    stages = mesh.shape["pp"] if row.is_staged and not num_stacked else 1
    elements = math.prod(row.shape[num_stacked:]) // experts // parts // stages
    return elements * row.precision.param.itemsize
