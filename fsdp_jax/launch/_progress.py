"""Position of this process, reported when the job stalls."""

from __future__ import annotations

import dataclasses
import operator
import threading
import time

TRAIN_STEP = "of the train step"
"""End of the phases in which a step of `make_train_step` runs."""


@dataclasses.dataclass(frozen=True)
class Position:
    """The last phase that a process began.

    Attributes:
      phase: Name of the phase.
      step: Training step; None outside of steps.
      began: Time of its beginning, by `time.monotonic` of this process.
    """

    phase: str
    step: int | None
    began: float


# Global, since a process has one position, as it has one `jax.process_index()`. The
# heartbeat thread of the client reads it.
_position = Position("starting", None, time.monotonic())
_moved = threading.Event()


def report_progress(phase: str, step: int | None = None) -> None:
    """Records what this process begins now, to be reported if the job stalls there.

    The steps of `make_train_step`, and saves and loads, call it themselves. Its cost is
    negligible, and without `fsdp.initialize()` it has no effect.

    Args:
      phase: Name of the phase, e.g. `"reading the next batch"`.
      step: Training step of the phase, as an integer of Python, numpy or jax; None for
        that of the last call.

    Raises:
      TypeError: If `step` is no integer.
    """
    global _position
    # What is sent to the coordinator is JSON.
    step = _position.step if step is None else operator.index(step)
    _position = Position(str(phase), step, time.monotonic())
    _moved.set()


def position() -> Position:
    """Returns the last phase that this process began."""
    return _position


def await_move(timeout_secs: float) -> None:
    """Blocks until a phase has begun since the last call, or until the timeout."""
    _moved.wait(timeout_secs)
    _moved.clear()
