"""Ends of a program by `sys.exit`, of which Python calls no hook."""

from __future__ import annotations

import dataclasses
import signal
import sys
import threading
from types import FrameType
from typing import NoReturn


@dataclasses.dataclass
class Exit:
    """What `sys.exit` raised in this program.

    `sys.excepthook` is not called for `SystemExit`, and functions of `atexit` do not
    learn why the program ends. So `watch` replaces `sys.exit` by a function that keeps
    what it raises and from where, and `uncaught` tells whether that was the end.

    Attributes:
      raised: What `sys.exit` raised last; None for nothing.
      lines: The frames that called it, each with its line.
    """

    raised: SystemExit | None = None
    lines: tuple[tuple[FrameType, int], ...] = ()

    def watch(self) -> None:
        """Begins to keep what `sys.exit` raises in the main thread."""
        before = sys.exit

        def exit_(status: object = None, /) -> NoReturn:
            try:
                before(status)  # pyright: ignore[reportArgumentType]
            except SystemExit as error:
                # In another thread it ends that thread alone.
                if threading.current_thread() is threading.main_thread():
                    self.raised, self.lines = error, _lines(sys._getframe(1))
                raise

        sys.exit = exit_

    def uncaught(self) -> SystemExit | None:
        """Returns what an uncaught `sys.exit` raised; None for any other end.

        To be called as the program ends. Not seen are a `SystemExit` that the program
        raises itself, and one on whose way other lines of it run, as in a `finally`.
        """
        # A frame that caught it went on to another line.
        is_caught = any(frame.f_lineno != line for frame, line in self.lines)
        return None if is_caught else self.raised


def status_of(error: SystemExit | None) -> int:
    """Returns the status with which Python ends for an error, 0 for none."""
    code = None if error is None else error.code
    if code is None or isinstance(code, int):
        return int(code or 0) & 0xFF  # As the operating system has it.
    return 1  # Python prints any other object, and ends with 1.


def is_failure(status: int) -> bool:
    """Returns whether a status is that of a failure, and not of a stop by a signal.

    A program that saves and ends after SIGTERM ends with 128 and the signal's number.
    So do the others of its job, some of them later. Above the signals are the statuses
    of programs that end with a negative one.
    """
    return 0 < status <= 128 or status >= 128 + signal.NSIG


def _lines(frame: FrameType | None) -> tuple[tuple[FrameType, int], ...]:
    found = []
    while frame is not None:
        found.append((frame, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)
