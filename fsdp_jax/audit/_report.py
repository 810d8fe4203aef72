"""What an audited program moves, as a table: one row a kind of collective of a unit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from fsdp_jax._report import Grid, format_bytes, html_page
from fsdp_jax.hlo._collectives import Moved
from fsdp_jax.hlo._parse import Shape
from fsdp_jax.sharding._plan import ROOT


@dataclasses.dataclass(frozen=True)
class AuditedRow:
    """Arrays that travel alike.

    Attributes:
      op: E.g. `all-gather`.
      unit: Whose parameters, or gradients; "-" for arrays of none, or of several that
        XLA merged.
      dtype: What crosses the wire, as HLO writes it.
      axes: Mesh axes along which; empty if along none of them as a whole.
      arrays: How many a step.
      bytes: Their size a step, whole: what a gather makes, what a reduction takes.
    """

    op: str
    unit: str
    dtype: str
    axes: tuple[str, ...]
    arrays: int
    bytes: int


@dataclasses.dataclass(frozen=True, repr=False)
class Audited:
    """What a program that passed its audit moves in a step.

    `print(audited)` shows it as a table.

    Attributes:
      rows: In the order in which they first travel.
    """

    rows: tuple[AuditedRow, ...]

    def __repr__(self) -> str:
        """The table, below what it is."""
        return "\n".join([_headline(self), "", _grid(self).as_text()])

    def _repr_html_(self) -> str:
        """The same for a notebook, with bars for the bytes."""
        return html_page([_headline(self), _grid(self)])


def audited(arrays: Iterable[Moved]) -> Audited:
    """Counts what a program moves.

    Args:
      arrays: From `moved`.
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
    return f"as planned: {arrays:,} arrays travel in a step, {size} as they are whole"


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
