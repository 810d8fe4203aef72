"""Status of a program that ends by `sys.exit`, of which Python tells no hook."""

from __future__ import annotations

import dataclasses
import sys
import threading
from types import FrameType
from typing import NoReturn


@dataclasses.dataclass
class ExitStatus:
    """Status with which this program ends.

    `sys.excepthook` is not called for `SystemExit`, and functions of `atexit` do not
    learn why the program ends. So `watch` replaces `sys.exit` by a function that keeps
    what it raises and from where, and `of_failure` tells whether that was the end.

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

    def of_failure(self) -> int:
        """Returns the status of an uncaught `sys.exit`; 0 for any other end.

        To be called as the program ends. Not seen are a `SystemExit` that the program
        raises itself, and one that it catches and raises again.
        """
        # A frame that caught it went on to another line.
        is_caught = any(frame.f_lineno != line for frame, line in self.lines)
        if self.raised is None or is_caught:
            return 0
        code = self.raised.code
        if code is None or isinstance(code, int):
            return int(code or 0) & 0xFF  # As the operating system has it.
        return 1  # Python prints any other object, and ends with 1.


def _lines(frame: FrameType | None) -> tuple[tuple[FrameType, int], ...]:
    found = []
    while frame is not None:
        found.append((frame, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)
