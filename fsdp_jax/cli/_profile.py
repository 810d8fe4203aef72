"""A profiler's trace of a few steps of a run."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import jax

from fsdp_jax._tree import PyTree
from fsdp_jax.cli._errors import check_creatable
from fsdp_jax.cli._options import Unset

_STEPS = 3
"""Enough to tell what repeats; traces grow by many MB a step on GPUs."""


@dataclasses.dataclass(frozen=True)
class Window:
    """Steps to trace, and the directory of the trace.

    Attributes:
      dir: Directory in which the profiler makes a folder.
      first: First step.
      last: Last step, at least `first`.
    """

    dir: Path
    first: int
    last: int


@dataclasses.dataclass(frozen=True)
class Profile:
    """Options of a trace.

    Attributes:
      profile: Directory for a trace of a few steps, for TensorBoard or XProf.
      profile_from: First step of the trace; default the second of this run, since the
        first one compiles.
      profile_steps: Number of steps of the trace; default 3, or those left.
    """

    profile: Unset[Path] = None
    profile_from: Unset[int] = None
    profile_steps: Unset[int] = None

    def check(self) -> None:
        """Raises a `ValueError` for options that are wrong for any run."""
        if self.profile is not None:
            check_creatable(self.profile, "--profile")
            return
        for name in ("profile_from", "profile_steps"):
            if (value := getattr(self, name)) is not None:
                raise ValueError(
                    f"--{name.replace('_', '-')} {value} says which steps to trace: "
                    "give --profile DIR too."
                )

    def window(self, start: int, steps: int) -> Window | None:
        """Returns the steps to trace, or None.

        Args:
          start: Number of steps done before the run.
          steps: Last step.

        Raises:
          ValueError: If the run makes other steps than these.
        """
        if self.profile is None:
            return None
        first, count = self.profile_from, self.profile_steps
        first = min(start + 2, steps) if first is None else first
        count = max(1, min(_STEPS, steps - first + 1)) if count is None else count
        if count < 1:
            raise ValueError(f"--profile-steps {count} must be at least 1.")
        last = first + count - 1
        if not start < first <= last <= steps:
            raise ValueError(
                f"--profile would trace steps {first} to {last}, but the run makes "
                f"steps {start + 1} to {steps}. Change --profile-from or "
                "--profile-steps."
            )
        return Window(self.profile, first, last)


@dataclasses.dataclass(frozen=True)
class Tracer:
    """Starts and stops the trace, each when the devices have nothing left to do.

    Attributes:
      window: Steps to trace; None for none.
      running: Stack that ends the trace when it is closed.
    """

    window: Window | None
    running: contextlib.ExitStack

    def before(self, step: int, state: PyTree) -> None:
        """Starts the trace if it begins with this step."""
        if self.window is not None and step == self.window.first:
            jax.block_until_ready(state)  # what is under way belongs to other steps
            self.running.enter_context(jax.profiler.trace(self.window.dir))

    def after(self, step: int, state: PyTree) -> None:
        """Writes the trace if it ends with this step."""
        if self.window is not None and step == self.window.last:
            jax.block_until_ready(state)
            self.running.close()


@contextlib.contextmanager
def tracer(window: Window | None) -> Iterator[Tracer]:
    """Yields a tracer whose trace ends with this context, if an error ends the run."""
    with contextlib.ExitStack() as running:
        yield Tracer(window, running)
