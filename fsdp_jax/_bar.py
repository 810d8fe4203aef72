"""A bar that shows on stderr, or in a notebook, how far something is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
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


@contextmanager
def bytes_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Shows how many bytes are done, how fast, and when all will be.

    ```
    with fsdp.bytes_bar("loading llama") as progress:
        params = bridge.load_hf(path, plan.params, progress=progress)
    ```

    On stderr, or live in a notebook, for which ipywidgets is needed. Of several
    processes the first shows it.

    Args:
      what: What is going on, e.g. `"loading llama"`.

    Yields:
      `show(done, total)`, the `progress` argument of bridge's functions.
    """
    columns = (
        TextColumn("{task.description}"),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with make_bar(*columns, TextColumn("ETA"), TimeRemainingColumn()) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def make_bar(*columns: ProgressColumn) -> Iterator[Progress]:
    """A bar behind some columns.

    Args:
      *columns: Of rich.

    Yields:
      rich's.
    """
    # On a terminal, results are printed above the bar; elsewhere they are not touched,
    # since they would be redirected to stderr with it.
    with Progress(
        *columns,
        BarColumn(bar_width=20),
        console=Console(stderr=True, quiet=jax.process_index() > 0),
        redirect_stdout=sys.stdout.isatty(),
        redirect_stderr=False,
    ) as bar:
        try:
            yield bar
        finally:
            bar.refresh()  # in a notebook rich leaves the last but one state
