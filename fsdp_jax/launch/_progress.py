"""Where this process stands: what a job shows of it when it stalls."""

from __future__ import annotations

import dataclasses
import threading
import time


@dataclasses.dataclass(frozen=True)
class Position:
    """The last thing that a process began.

    Attributes:
      phase: What, in words.
      step: The step of the training; None where there is none.
      began: When, by `time.monotonic` of this process.
    """

    phase: str
    step: int | None
    began: float


# One program runs in a process, and its position is a fact of the process, as
# `jax.process_index()` is; a thread of its own reads it.
_position = Position("starting", None, time.monotonic())
_moved = threading.Event()


def report_progress(phase: str, step: int | None = None) -> None:
    """Says what this process begins now, which is shown if the job stalls there.

    The steps of `make_train_step`, and saves and loads, say so themselves. It costs
    nothing, and without `fsdp.initialize()` it does nothing.

    Args:
      phase: What begins, e.g. `"reading the next batch"`.
      step: The step that it belongs to; None leaves that of the last call.
    """
    global _position
    step = _position.step if step is None else step
    _position = Position(phase, step, time.monotonic())
    _moved.set()


def position() -> Position:
    """What this process began last."""
    return _position


def await_move(timeout_secs: float) -> None:
    """Returns when something new began since the last call, or after some time."""
    _moved.wait(timeout_secs)
    _moved.clear()
