"""Progress bars on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import TextColumn, TimeRemainingColumn

from fsdp_jax._report import make_bar


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
