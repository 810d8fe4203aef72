"""Table of a step's collectives: bytes, axes, number of runs, exposed time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from fsdp_jax._report import Grid, format_bytes
from fsdp_jax._scopes import CONTEXT_PARALLEL, is_in, is_recomputed, is_transposed
from fsdp_jax.hlo._collectives import Collective, axes_of
from fsdp_jax.planner._interconnect import communicated_bytes
from fsdp_jax.planner._timeline import Sent, Timeline
from fsdp_jax.sharding._plan import Plan


@dataclasses.dataclass(frozen=True)
class SentRow:
    """Equal collectives of the compiled step, over all their runs.

    Attributes:
      op: Opcode, e.g. `all-gather`.
      direction: "forward" or "backward".
      unit: Unit of the parameters; "-" if it communicates none.
      dtype: Communicated dtype, as HLO writes it.
      axes: Mesh axes; empty if the replica groups lie along none.
      bytes: Bytes that a device sends per run, in a ring.
      times: Runs per step.
      seconds: Seconds of one run with the bandwidth to itself.
      exposed_seconds: Seconds that the GPU waits for it, over all runs.
    """

    op: str
    direction: str
    unit: str
    dtype: str
    axes: tuple[str, ...]
    bytes: int
    times: int
    seconds: float
    exposed_seconds: float


def sent_rows(timeline: Timeline, plan: Plan) -> tuple[SentRow, ...]:
    """Returns rows of collectives that differ, in the order of their first runs."""
    runs: dict[str, list[Sent]] = {}
    for sent in timeline.sent:
        runs.setdefault(sent.collective.name, []).append(sent)
    folded: dict[tuple, SentRow] = {}
    for found in runs.values():
        row = _row(found, plan)
        key = row.op, row.direction, row.unit, row.dtype, row.axes, row.bytes
        folded[key] = _together(folded[key], row) if key in folded else row
    return tuple(folded.values())


def _together(a: SentRow, b: SentRow) -> SentRow:
    exposed = a.exposed_seconds + b.exposed_seconds
    return dataclasses.replace(a, times=a.times + b.times, exposed_seconds=exposed)


def _row(runs: list[Sent], plan: Plan) -> SentRow:
    first = runs[0]
    collective = first.collective
    dtypes = dict.fromkeys(shape.dtype for shape in collective.sent)
    return SentRow(
        op=collective.op,
        direction="backward" if _in_backward(first) else "forward",
        unit=_unit(collective, plan),
        dtype="+".join(dtypes),
        axes=axes_of(collective.groups, plan.mesh) or (),
        bytes=round(communicated_bytes(collective, plan.mesh.size)),
        times=len(runs),
        seconds=first.end - first.start,
        exposed_seconds=sum(run.exposed for run in runs),
    )


def _in_backward(sent: Sent) -> bool:
    """Returns whether it is of backward; what is computed again there is too."""
    scopes = sent.collective.op_name
    return sent.in_backward or is_transposed(scopes) or is_recomputed(scopes)


def _unit(collective: Collective, plan: Plan) -> str:
    """Returns the path of the unit; all that match if XLA merged several.

    Collectives over tp alone are tokens, or gradients of weights replicated over tp;
    attention over cp sends keys and values, and a shift tokens. None has a unit.
    """
    axes = axes_of(collective.groups, plan.mesh)
    is_context = any(is_in(collective.op_name, name) for name in CONTEXT_PARALLEL)
    if axes == ("tp",) or (axes == ("cp",) and is_context):
        return "-"
    unsharded = {
        shape.dims
        for shape in (*collective.sent, *collective.received)
        if shape.num_elements > 1
    }
    units = dict.fromkeys(
        param.unit
        for param in plan.param_plans
        if {param.shape[param.num_stacked :], param.padded_shape[param.num_stacked :]}
        & unsharded
    )
    # Of merged collectives XLA keeps one scope, so the dims decide if they disagree.
    if collective.unit and (collective.unit in units or not units):
        return collective.unit
    return " + ".join(units) or "-"


def _shown(unit: str) -> str:
    """Shortens the units of a small collective that all layers share."""
    units = unit.split(" + ")
    others = len(units) - 2
    return unit if others < 2 else f"{units[0]} + {units[1]} + {others} others"


def sent_grid(rows: Sequence[SentRow], *, timed: bool = True) -> Grid:
    """Returns the rows as a table.

    Args:
      rows: Rows from `sent_rows`.
      timed: Whether to include the columns of time.
    """
    columns = {
        "collective": "left",
        "in": "left",
        "unit": "left",
        "dtype": "left",
        "over": "left",
        "bytes each": "right",
        "times": "right",
        "ms each": "right",
        "exposed ms": "right",
    }
    cells = [
        (
            row.op,
            row.direction,
            _shown(row.unit),
            row.dtype,
            " x ".join(row.axes) or "?",
            format_bytes(row.bytes),
            str(row.times),
            f"{row.seconds * 1e3:.2f}",
            f"{row.exposed_seconds * 1e3:.2f}",
        )
        for row in rows
    ]
    if timed:
        return Grid(columns, cells, [row.exposed_seconds for row in rows])
    untimed = dict(list(columns.items())[:-2])
    return Grid(untimed, [row[:-2] for row in cells])
