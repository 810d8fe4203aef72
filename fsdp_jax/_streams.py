"""Standard streams whose reader may have gone, as in `fsdp-jax inspect DIR | head`."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import IO

from rich.console import Console


def open_closed() -> None:
    """Opens stdout and stderr to nowhere where they are closed, as by `>&-`.

    Python has None for a closed stream; printing to a stderr of None prints to stdout.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))


def discard(stream: IO[str]) -> None:
    """Sends what a stream writes from now on to nowhere.

    Python flushes the standard streams when it ends, and would fail there again.

    Args:
      stream: Stream whose reader has gone.
    """
    with suppress(OSError, ValueError):  # One of no file, e.g. of a test or a notebook.
        number = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)


class LenientConsole(Console):
    """A console that falls silent when its reader has gone, where rich's would exit.

    What is shown for watching must not end a run that nobody watches any more.
    """

    def on_broken_pipe(self) -> None:
        """Prints nothing from now on."""
        self.quiet = True
        discard(self.file)
