"""Tables and sizes as people read them."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table


def text_table(columns: Mapping[str, str], rows: Sequence[Sequence[str]]) -> str:
    """Plain text, one line a row, as wide as its widest row.

    Args:
      columns: Header -> "left" or "right".
      rows: One string a column.
    """
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    for header, justify in columns.items():
        table.add_column(
            header, justify="right" if justify == "right" else "left", no_wrap=True
        )
    for row in rows:
        table.add_row(*row)
    # A table that wraps at 80 columns can be neither read nor searched.
    out = io.StringIO()
    # In a notebook rich would otherwise write HTML to the cell, and nothing to `out`.
    console = Console(file=out, width=10_000, color_system=None, force_jupyter=False)
    console.print(table, markup=False)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def format_bytes(num_bytes: int) -> str:
    """Bytes in the unit that leaves one to four digits before the point."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.2f} {unit}"
    return f"{num_bytes} B"
