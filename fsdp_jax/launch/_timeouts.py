"""How long a job waits, before it says so and before it gives up."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Patience:
    """Seconds after which waiting is reported, or ends the job.

    Attributes:
      start_secs: For all processes to have come.
      silent_secs: Without a sign of life from a process, which is then taken for dead:
        its machine is gone, or it was stopped.
      report_secs: Without progress in any process, until where each one stands is
        printed; and again as long after.
      stall_secs: Without progress in any process, until the job ends.
    """

    start_secs: float = 300
    silent_secs: float = 60
    report_secs: float = 120
    stall_secs: float = 1800

    def __post_init__(self):
        wrong = {k: v for k, v in dataclasses.asdict(self).items() if not v > 0}
        if wrong:
            shown = ", ".join(f"{name}={value}" for name, value in wrong.items())
            raise ValueError(f"Patience({shown}): seconds are more than 0.")

    @property
    def beat_secs(self) -> float:
        """How often a process gives a sign of life."""
        return min(self.silent_secs, self.report_secs, self.stall_secs) / 20
