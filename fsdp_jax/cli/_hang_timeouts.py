"""XLA's two timeouts for hangs on GPUs: as set, and what is missing."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from fsdp_jax.cli._environment import Finding
from fsdp_jax.cli._xla_flags import value_of
from fsdp_jax.training._compiler_options import compiler_options

NCCL = "xla_gpu_nccl_termination_timeout_seconds"
WATCHDOG = "xla_gpu_execution_terminate_timeout"

_DURATION = re.compile(r"[+-]?(inf|0|(\d+(\.\d*)?|\.\d+)(ns|us|ms|s|m|h))+")


@dataclasses.dataclass(frozen=True)
class HangTimeouts:
    """Timeouts of steps on GPUs, of `XLA_FLAGS` or of the compiler options.

    Attributes:
      nccl: Seconds after which a collective that devices of one process do not all
        launch ends the process; below 0 never.
      watchdog: Time after which XLA ends a process whose execution has not, e.g.
        "1800s"; "" for never.
    """

    nccl: int
    watchdog: str

    def findings(self) -> Iterator[Finding]:
        """Yields what would hang in silence, or is not a time."""
        if self.nccl < 0:
            yield Finding(
                "A collective that one device of a process never enters hangs in "
                "silence.",
                f'export XLA_FLAGS="$XLA_FLAGS --{NCCL}=600"',
                is_wrong=False,
            )
        if not self.watchdog:
            yield Finding(
                "A collective that another process never enters hangs in silence.",
                f'export XLA_FLAGS="$XLA_FLAGS --{WATCHDOG}=1800s"',
                is_wrong=False,
            )
        elif not _DURATION.fullmatch(self.watchdog):
            yield Finding(
                f"{WATCHDOG}={self.watchdog} is not a duration: XLA fails at step 1.",
                f'export XLA_FLAGS="$XLA_FLAGS --{WATCHDOG}=1800s"',
            )

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yields what a table says of them."""
        yield "NCCL time-out", "never" if self.nccl < 0 else f"{self.nccl} s"
        yield "watchdog of executions", self.watchdog or "never"


def hang_timeouts(flags: str) -> HangTimeouts:
    """Returns the timeouts of `XLA_FLAGS`; of the compiler options where it has none.

    Args:
      flags: Value of `XLA_FLAGS`.
    """
    set_by_steps = compiler_options()
    nccl, watchdog = (
        value_of(flags, name) or str(set_by_steps.get(name, default))
        for name, default in ((NCCL, -1), (WATCHDOG, ""))
    )
    try:
        seconds = int(nccl)
    except ValueError:  # Flags that no child had the time to try.
        seconds = -1
    return HangTimeouts(seconds, "" if watchdog.lstrip("+") == "inf" else watchdog)
