"""Formats tables, sizes and progress bars."""

from __future__ import annotations

import dataclasses
import html
import io
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import jax
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from fsdp_jax._streams import LenientConsole


@dataclasses.dataclass(frozen=True)
class Grid:
    """A table before it is formatted.

    Attributes:
      columns: Header -> "left", "right", or "text" for sentences, which wrap in HTML.
      rows: Rows, with one string per column.
      sizes: Size of each row, drawn as a bar behind its last column in HTML; () for no
        bars.
    """

    columns: Mapping[str, str]
    rows: Sequence[Sequence[str]]
    sizes: Sequence[float] = ()

    def as_text(self) -> str:
        """Returns plain text, one line per row, as wide as the widest row."""
        return text_table(self.columns, self.rows)

    def as_html(self) -> str:
        """Returns an HTML table in the notebook's own colours, light or dark."""
        head = "".join(_cell("th", *column) for column in self.columns.items())
        largest = max(self.sizes, default=0)
        shares = [size / largest if largest else 0.0 for size in self.sizes]
        body = [
            self._html_row(row, share)
            for row, share in zip(
                self.rows, shares or [0.0] * len(self.rows), strict=True
            )
        ]
        return f"<table><tr>{head}</tr>{''.join(body)}</table>"

    def _html_row(self, row: Sequence[str], share: float) -> str:
        sides = list(self.columns.values())
        cells = [_cell("td", text, side) for text, side in zip(row, sides, strict=True)]
        if share:
            cells[-1] = _cell("td", row[-1], sides[-1], share)
        return f"<tr>{''.join(cells)}</tr>"


def html_page(parts: Sequence[Grid | str]) -> str:
    """Stacks tables and lines of text in HTML."""
    drawn = [
        part.as_html() if isinstance(part, Grid) else f"<div>{html.escape(part)}</div>"
        for part in parts
    ]
    return f"<div>{''.join(drawn)}</div>"


def html_document(title: str, body: str) -> str:
    """Returns a file for a browser.

    Args:
      title: Title of the window.
      body: HTML from `html_page`.
    """
    head = f"<meta charset=utf-8><title>{html.escape(title)}</title>"
    return f"<!doctype html>\n{head}\n<body>{body}</body>\n"


def _cell(tag: str, text: str, side: str, share: float = 0.0) -> str:
    style = f"text-align:{side};white-space:nowrap"
    if side == "text":
        style = "text-align:left;white-space:normal"
    if share:
        colour = "rgba(70,130,180,.35)"
        style += (
            f";background:linear-gradient(to left,{colour} {share:.1%},transparent 0)"
        )
    return f'<{tag} style="{style}">{html.escape(text)}</{tag}>'


def text_table(columns: Mapping[str, str], rows: Sequence[Sequence[str]]) -> str:
    """Returns plain text, one line per row, as wide as the widest row.

    Args:
      columns: Header -> "left" or "right".
      rows: Rows, with one string per column.
    """
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    for header, justify in columns.items():
        table.add_column(
            header, justify="right" if justify == "right" else "left", no_wrap=True
        )
    for row in rows:
        table.add_row(*row)
    # A large width, since a table wrapped at 80 columns cannot be read or searched.
    out = io.StringIO()
    # In a notebook, rich would otherwise write HTML to the cell instead of to `out`.
    console = Console(file=out, width=10_000, color_system=None, force_jupyter=False)
    console.print(table, markup=False)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def format_bytes(num_bytes: int) -> str:
    """Formats bytes in the largest of GiB, MiB, KiB and B that is at most as large."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.2f} {unit}"
    return f"{num_bytes} B"


@contextmanager
def bytes_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Shows a progress bar of bytes, with speed and remaining time.

    ```
    with fsdp.bytes_bar("loading llama") as progress:
        params = bridge.load_hf(path, plan.params, progress=progress)
    ```

    The bar is on stderr, or live in a notebook, which needs ipywidgets. Only process 0
    shows it.

    Args:
      what: Label of the bar, e.g. `"loading llama"`.

    Yields:
      Function `show(done, total)` in bytes, the `progress` argument of bridge's
      functions.
    """
    columns = (
        TextColumn("{task.description}"),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with make_bar(*columns, TextColumn("ETA"), TimeRemainingColumn()) as bar:
        # Shown from the first bytes on: what is refused before has no progress.
        task = bar.add_task(what, total=None, visible=False)
        yield lambda done, total: bar.update(
            task, completed=done, total=total, visible=True
        )


@contextmanager
def make_bar(*columns: ProgressColumn) -> Iterator[Progress]:
    """Makes a progress bar with `columns` before it.

    Args:
      *columns: Columns of rich.

    Yields:
      A `rich.progress.Progress`.
    """
    # On a terminal, rich prints stdout above the bar. If stdout is redirected, leave it
    # alone: rich would send it to stderr.
    with Progress(
        *columns,
        BarColumn(bar_width=20),
        console=LenientConsole(stderr=True, quiet=jax.process_index() > 0),
        redirect_stdout=sys.stdout.isatty(),
        redirect_stderr=False,
    ) as bar:
        try:
            yield bar
        finally:
            bar.refresh()  # In a notebook rich does not show the last update by itself.
