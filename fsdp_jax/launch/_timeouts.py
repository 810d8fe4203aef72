"""Timeouts of a job: for its start, silent processes, and stalls."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Timeouts:
    """Timeouts in seconds, after which a wait is reported or ends the job.

    Attributes:
      start_secs: Timeout for all processes to connect.
      silent_secs: Time without a heartbeat after which a process counts as dead: its
        machine is gone, or it was stopped.
      report_secs: Time without progress in any process after which the position of each
        is printed, and the interval of further reports.
      stall_secs: Time without progress in any process after which the job ends.
      left_secs: The same once a process has ended, for which others may wait in vain;
        work that takes longer, such as an export of one process, reports its progress.
    """

    start_secs: float = 300
    silent_secs: float = 60
    report_secs: float = 120
    stall_secs: float = 1800
    left_secs: float = 300

    def __post_init__(self):
        wrong = {k: v for k, v in dataclasses.asdict(self).items() if not v > 0}
        if wrong:
            shown = ", ".join(f"{name}={value}" for name, value in wrong.items())
            raise ValueError(f"Timeouts({shown}): seconds are more than 0.")

    @property
    def beat_secs(self) -> float:
        """Interval between heartbeats, in seconds."""
        waits = (self.silent_secs, self.report_secs, self.stall_secs, self.left_secs)
        return min(waits) / 20
