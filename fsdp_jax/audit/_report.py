"""Table of an audited program's collectives: one row per kind and unit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from fsdp_jax._report import Grid, format_bytes, html_page
from fsdp_jax.hlo._parse import Shape
from fsdp_jax.hlo._program import CommunicatedArray
from fsdp_jax.sharding._plan import ROOT


@dataclasses.dataclass(frozen=True)
class AuditedRow:
    """Communicated arrays of the same kind, unit, dtype and axes.

    Attributes:
      op: Opcode, e.g. `all-gather`.
      unit: Unit of the parameters or gradients; "-" for arrays of no unit, or of
        several units that XLA merged.
      dtype: Communicated dtype, as HLO writes it.
      axes: Mesh axes; empty if the replica groups lie along none.
      arrays: Number of arrays per step.
      bytes: Unsharded bytes per step: results of gathers, operands of reductions.
    """

    op: str
    unit: str
    dtype: str
    axes: tuple[str, ...]
    arrays: int
    bytes: int


@dataclasses.dataclass(frozen=True, repr=False)
class Audited:
    """Collectives per step of a program that passed its audit.

    `print(audited)` shows a table.

    Attributes:
      rows: Rows of the table, in the order of their first collective.
    """

    rows: tuple[AuditedRow, ...]

    def __repr__(self) -> str:
        """Formats headline and table as text."""
        return "\n".join([_headline(self), "", _grid(self).as_text()])

    def _repr_html_(self) -> str:
        """Formats headline and table as HTML, with bars for the bytes."""
        return html_page([_headline(self), _grid(self)])


def audited(arrays: Iterable[CommunicatedArray]) -> Audited:
    """Counts the communicated arrays of a program.

    Args:
      arrays: Arrays from `moved`.
    """
    counts: dict[tuple, tuple[int, int]] = {}
    for one in arrays:
        unit = ROOT if one.unit == "root" else one.unit or "-"
        key = one.op, unit, one.dtype, one.axes or ()
        size = Shape(one.dtype, (one.elements,)).bytes
        number, total = counts.get(key, (0, 0))
        counts[key] = number + one.times, total + one.times * size
    rows = (
        AuditedRow(op, unit, dtype, axes, number, total)
        for (op, unit, dtype, axes), (number, total) in counts.items()
    )
    return Audited(tuple(rows))


_COLUMNS = {
    "collective": "left",
    "unit": "left",
    "dtype": "left",
    "over": "left",
    "arrays a step": "right",
    "bytes a step": "right",
}


def _headline(found: Audited) -> str:
    arrays = sum(row.arrays for row in found.rows)
    size = format_bytes(sum(row.bytes for row in found.rows))
    return f"as planned: {arrays:,} arrays are communicated in a step, {size} unsharded"


def _grid(found: Audited) -> Grid:
    cells = [
        (
            row.op,
            row.unit,
            row.dtype,
            " x ".join(row.axes) or "?",
            f"{row.arrays:,}",
            format_bytes(row.bytes),
        )
        for row in found.rows
    ]
    return Grid(_COLUMNS, cells, [row.bytes for row in found.rows])
