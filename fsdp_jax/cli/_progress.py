"""Progress bars on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import TextColumn, TimeRemainingColumn

from fsdp_jax._report import format_bytes, make_bar
from fsdp_jax.cli._metrics import StepMetrics


@contextmanager
def rows_bar(what: str, rows: int) -> Iterator[Callable[[int], None]]:
    """Shows the number of rows done and the remaining time.

    Args:
      what: Label of the bar, e.g. `"evaluating"`.
      rows: Number of all rows.

    Yields:
      Function `show(done)`.
    """
    columns = (TextColumn("{task.description} {task.completed}/{task.total} rows"),)
    with make_bar(*columns, TextColumn("ETA"), TimeRemainingColumn()) as bar:
        task = bar.add_task(what, total=rows)
        yield lambda done: bar.update(task, completed=done)


@contextmanager
def step_bar(start: int, steps: int) -> Iterator[Callable[[StepMetrics], None]]:
    """Shows step, loss, speed, memory and the remaining time.

    Args:
      start: Number of steps done before.
      steps: Last step.

    Yields:
      Function `show(metrics)`, called after each step.
    """
    columns = (
        TextColumn("step {task.completed}/{task.total}"),
        TextColumn("{task.description}"),
    )
    with make_bar(*columns, TextColumn("ETA"), TimeRemainingColumn()) as bar:
        task = bar.add_task("compiling", total=steps, completed=start)
        yield lambda metrics: bar.update(
            task, completed=metrics.step, description=_describe(metrics)
        )


def _describe(metrics: StepMetrics) -> str:
    return (
        f"loss {metrics.loss:.4f}  {metrics.tokens_per_sec:,.0f} tokens/s  "
        f"{format_bytes(metrics.peak_memory_bytes)}"
    )
