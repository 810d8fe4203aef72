"""Drops what XLA logs while it compiles for GPUs that are not there.

Such lines say nothing of the plan: that there is no driver, that a compilation takes
long, and what the plan's own memory alarm says too. All other lines are passed on, as
they come.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_LINES = re.compile(
    rb"WARNING: All log messages before absl::InitializeLog\(\) .*"
    rb"|[IWE]\d{4} .* (cudart_stub|slow_operation_alarm|hlo_rematerialization)\.cc:.*"
    rb"|[IWE]\d{4} .* gpu_hlo_schedule\.cc:\d+\] The byte size of input/output .*"
    rb"|\*{32}"
    rb"|\[Compiling module .*\] Very slow compile\? .*"
)


_LEFT_SECS = 5.0
"""Seconds in which child processes, such as ptxas, let go of stderr."""


@contextmanager
def without_xla_lines() -> Iterator[None]:
    """Drops these lines from the file descriptor of stderr, which C++ writes to."""
    try:
        kept = os.dup(2)
    except OSError:  # stderr is closed.
        yield
        return
    read, write = os.pipe()
    os.dup2(write, 2)
    os.close(write)
    passing = threading.Thread(target=_pass_on, args=(read, kept), daemon=True)
    passing.start()
    try:
        yield
    finally:
        if sys.stderr is not None:
            sys.stderr.flush()
        os.dup2(kept, 2)  # Closes the pipe, so that the thread ends.
        passing.join(timeout=_LEFT_SECS)
        if not passing.is_alive():  # Else a child has the pipe, and lines may come.
            os.close(kept)


def _pass_on(source: int, target: int) -> None:
    after_dropped = False
    with open(source, "rb") as lines:
        for line in lines:
            plain = line.rstrip(b"\n")
            is_dropped = bool(_LINES.fullmatch(plain))
            # XLA's alarm has an empty line within.
            if not is_dropped and (plain or not after_dropped):
                os.write(target, line)
            after_dropped = is_dropped
