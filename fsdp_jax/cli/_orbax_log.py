"""Shows what Orbax logs of a failure as a line: the command says the rest itself.

Orbax logs the traceback of each save that fails, and of an interrupt that comes while
it waits for a save, and raises the same error to its caller. What TensorStore still
writes then finds the event loop of the save closed, and Python says of each such error
that nobody has asked for it.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable
from typing import Any

_ORBAX = "orbax"
_CLOSED = "Event loop is closed"
_WRITING = "Error writing "  # As all of TensorStore's begin, behind their status.


class _Tracebacks(logging.Filter):
    """Takes the traceback from Orbax's messages, and drops those of interrupts."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns whether the message is shown."""
        if _ORBAX not in record.pathname or not record.exc_info:
            return True
        error = record.exc_info[1]
        if isinstance(error, KeyboardInterrupt):
            return False
        record.msg, record.args = f"{record.getMessage()} {error}", ()
        record.exc_info = record.exc_text = None
        return True


_TRACEBACKS = _Tracebacks()


class _OfWrites(logging.Filter):
    """Drops errors of writes that nobody has asked for: one of them is raised."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns whether the message is shown."""
        error = record.exc_info[1] if record.exc_info else None
        is_asked_for = "never retrieved" not in record.getMessage()
        return is_asked_for or _WRITING not in str(error)


_OF_WRITES = _OfWrites()


@dataclasses.dataclass(frozen=True)
class _Unraisable:
    """Hook for errors that nobody can catch, which drops those of closed event loops.

    Attributes:
      shown: Hook for all others.
    """

    shown: Callable[[Any], Any]

    def __call__(self, unraisable: Any) -> None:
        """Shows an error."""
        error, trace = unraisable.exc_value, unraisable.exc_traceback
        # TensorStore calls asyncio from no line of Python.
        is_of_asyncio = trace and "asyncio" in trace.tb_frame.f_code.co_filename
        if not (is_of_asyncio and str(error) == _CLOSED):
            self.shown(unraisable)


def be_brief_about_saves() -> None:
    """Leaves tracebacks out of what Orbax logs; once Orbax is imported."""
    logging.getLogger("absl").addFilter(_TRACEBACKS)
    logging.getLogger("asyncio").addFilter(_OF_WRITES)
    if not isinstance(sys.unraisablehook, _Unraisable):
        sys.unraisablehook = _Unraisable(sys.unraisablehook)
