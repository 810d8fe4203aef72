"""Shows what Orbax logs of a failure as a line: the command says the rest itself.

Orbax logs the traceback of each save that fails, and of an interrupt that comes while
it waits for a save, and raises the same error to its caller.
"""

from __future__ import annotations

import logging

_ORBAX = "orbax"


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


def be_brief_about_saves() -> None:
    """Leaves tracebacks out of what Orbax logs; once Orbax is imported."""
    logging.getLogger("absl").addFilter(_TRACEBACKS)
