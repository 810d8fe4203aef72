"""What is shown on stderr while a command works."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import TextColumn, TimeRemainingColumn

from fsdp_jax._report import format_bytes, make_bar
from fsdp_jax.cli._metrics import StepMetrics


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
    with make_bar(*columns, TextColumn("ETA"), TimeRemainingColumn()) as bar:
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
