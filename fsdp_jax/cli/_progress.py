"""What is shown on stderr while a command works."""

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

from fsdp_jax._table import format_bytes
from fsdp_jax.cli._metrics import StepMetrics


@contextmanager
def bytes_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Shows how many bytes are done, how fast, and when all will be.

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
    with _progress(*columns, TextColumn("ETA"), TimeRemainingColumn()) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def rows_bar(what: str, rows: int) -> Iterator[Callable[[int], None]]:
    """Shows how many rows are done, and when all will be.

    Args:
      what: What is going on, e.g. `"evaluating"`.
      rows: All of them.

    Yields:
      `show(done)`.
    """
    columns = (TextColumn("{task.description} {task.completed}/{task.total} rows"),)
    with _progress(*columns, TextColumn("ETA"), TimeRemainingColumn()) as bar:
        task = bar.add_task(what, total=rows)
        yield lambda done: bar.update(task, completed=done)


@contextmanager
def step_bar(start: int, steps: int) -> Iterator[Callable[[StepMetrics], None]]:
    """Shows step, loss, speed, memory, and when training will be done.

    Args:
      start: Steps done before.
      steps: The last step.

    Yields:
      `show(metrics)`, to be called after each step.
    """
    columns = (
        TextColumn("step {task.completed}/{task.total}"),
        TextColumn("{task.description}"),
    )
    with _progress(*columns, TextColumn("ETA"), TimeRemainingColumn()) as bar:
        task = bar.add_task("compiling", total=steps, completed=start)
        yield lambda metrics: bar.update(
            task, completed=metrics.step, description=_describe(metrics)
        )


def _describe(metrics: StepMetrics) -> str:
    return (
        f"loss {metrics.loss:.4f}  {metrics.tokens_per_sec:,.0f} tokens/s  "
        f"{format_bytes(metrics.peak_memory_bytes)}"
    )


def _progress(*columns: ProgressColumn) -> Progress:
    # On a terminal, results are printed above the bar; elsewhere they are not touched,
    # since they would be redirected to stderr with it.
    return Progress(
        *columns,
        BarColumn(bar_width=20),
        console=Console(stderr=True, quiet=jax.process_index() > 0),
        redirect_stdout=sys.stdout.isatty(),
        redirect_stderr=False,
    )
