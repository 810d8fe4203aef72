"""Display of a run: a live screen, or a progress bar."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import jax
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from fsdp_jax._report import make_bar
from fsdp_jax._streams import LenientConsole
from fsdp_jax.cli._loss_curve import LossHistory, draw_curve
from fsdp_jax.cli._metrics import StepMetrics

_LINES = 8
# Below these a curve shows nothing; they leave room for messages above it.
_MIN_WIDTH, _MIN_HEIGHT = 40, 16


class Screen(Protocol):
    """Display of the steps of a run.

    Attributes:
      has_figures: Whether it shows all metrics, in the place of a line a step.
    """

    has_figures: bool

    def show(self, metrics: StepMetrics) -> None:
        """Shows a step."""


@contextmanager
def step_screen(start: int, steps: int) -> Iterator[Screen]:
    """Shows steps on stderr: live with a loss curve on a terminal, or as a bar.

    Args:
      start: Number of steps done before.
      steps: Last step.
    """
    console = LenientConsole(stderr=True, quiet=jax.process_index() > 0)
    if not _has_room(console):
        with make_bar(*_columns()) as bar:
            yield _Bar(bar, start, steps)
        return
    bar = Progress(*_columns(), BarColumn(bar_width=20), console=console)
    screen = LiveScreen(console, bar, start, steps)
    # What is printed to the terminal stands above; a redirected stdout is left alone.
    with Live(
        console=console,
        get_renderable=screen.render,
        redirect_stdout=sys.stdout.isatty(),
        redirect_stderr=True,
    ):
        yield screen


def _has_room(console: Console) -> bool:
    if not console.is_terminal or console.is_dumb_terminal or console.is_jupyter:
        return False
    return console.width >= _MIN_WIDTH and console.height >= _MIN_HEIGHT


def _columns() -> tuple[ProgressColumn, ...]:
    return (
        TextColumn("step {task.completed}/{task.total}"),
        TextColumn("{task.description}"),
        TextColumn("ETA"),
        TimeRemainingColumn(),
    )


class _Bar:
    """A progress bar with the loss and the speed."""

    has_figures = False

    def __init__(self, bar: Progress, start: int, steps: int):
        self._bar = bar
        self._task = bar.add_task("compiling", total=steps, completed=start)

    def show(self, metrics: StepMetrics) -> None:
        figures = metrics.figures()
        shown = [figures[name] for name in ("loss", "speed", "memory")]
        self._bar.update(
            self._task, completed=metrics.step, description="  ".join(shown)
        )


class LiveScreen:
    """The loss as a curve, the newest figures, and a progress bar.

    Args:
      console: Terminal.
      bar: Progress bar.
      start: Number of steps done before.
      steps: Last step.
    """

    def __init__(self, console: Console, bar: Progress, start: int, steps: int):
        self._console, self._bar = console, bar
        self._task = bar.add_task("compiling", total=steps, completed=start)
        self._history, self._figures = LossHistory(), {}
        self._held_out: list[tuple[float, int]] = []
        # stdout's lines are left out only where a person sees this screen instead.
        self.has_figures = sys.stdout.isatty()

    def show(self, metrics: StepMetrics) -> None:
        """Takes in a step, which is drawn a few times a second.

        Args:
          metrics: Metrics of the step.
        """
        self._history.add(metrics.loss)
        if metrics.eval_loss is not None:
            self._held_out.append((metrics.eval_loss, metrics.step))
        self._figures = metrics.figures()
        self._bar.update(self._task, completed=metrics.step, description="")

    def render(self) -> RenderableType:
        """Returns what is drawn, as wide as the terminal is now."""
        width = min(self._console.width, 100)
        braille = self._console.encoding.startswith("utf")
        curve = draw_curve(self._history.means, width, _LINES, braille=braille)
        figures = {**self._figures, **self._held_out_figures()}
        lines = [*map(Text, curve), Text("  ".join(figures.values()))]
        return Group(*(lines if self._figures else []), self._bar.get_renderable())

    def _held_out_figures(self) -> dict[str, str]:
        if not self._held_out:
            return {}
        (newest, step), (best, at) = self._held_out[-1], min(self._held_out)
        text = f"held-out loss {newest:.4f} (step {step}), best {best:.4f} (step {at})"
        return {"held_out": text}
