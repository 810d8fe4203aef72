"""Decisions of an elastic job: how many replicas run, on which places."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping

# Most times that the time for which a place is left out is doubled.
_MAX_DOUBLINGS = 32


@dataclasses.dataclass(frozen=True)
class ElasticConfig:
    """Limits of an elastic job.

    Attributes:
      min_replicas: Smallest number of replicas that the job runs with.
      max_replicas: Number of replicas of the complete job.
      max_restarts: Number of generations that may fail; the next failure ends the
        job.
      rejoin_secs: Time for which the place of a dead process is left out, doubled with
        each further death there; 0 to use it again at once, `math.inf` to leave it out
        until `ElasticProcesses.grow`. The job ends below `min_replicas` if no place
        returns by itself.
      global_batch: Rows of a step, the same as the program's; None to run with divisors
        of `max_replicas` alone, which divide each batch that the complete job divides.
      stop_secs: Time for the program to save its step and end before a growth.

    Raises:
      ValueError: If a number is out of its range; all offenders in one message.
    """

    min_replicas: int
    max_replicas: int
    max_restarts: int = 10
    rejoin_secs: float = 60.0
    global_batch: int | None = None
    stop_secs: float = 600.0

    def __post_init__(self):
        wrong = []
        if not 1 <= self.min_replicas <= self.max_replicas:
            wrong.append(
                f"elastic {self.min_replicas}:{self.max_replicas}: MIN:MAX replicas, "
                "from 1, MIN at most MAX"
            )
        if self.max_restarts < 0:
            wrong.append(f"max_restarts {self.max_restarts} must be at least 0")
        if not self.rejoin_secs >= 0:
            wrong.append(f"rejoin_secs {self.rejoin_secs} must be at least 0, or inf")
        if not 0 < self.stop_secs < math.inf:
            wrong.append(f"stop_secs {self.stop_secs}: finite, more than 0")
        rows = self.global_batch
        if rows is not None and (rows < 1 or rows % max(self.max_replicas, 1)):
            wrong.append(
                f"global_batch {rows}: a multiple of the {self.max_replicas} replicas"
            )
        if wrong:
            raise ValueError("; ".join(wrong) + ".")

    def processes_per_replica(self, num_processes: int) -> int:
        """Returns the processes of a replica.

        Args:
          num_processes: Processes of the complete job.

        Raises:
          ValueError: If the replicas do not divide them.
        """
        size, rest = divmod(num_processes, self.max_replicas)
        if rest or not size:
            raise ValueError(
                f"{num_processes} processes do not make {self.max_replicas} equal "
                f"replicas: use a multiple of {self.max_replicas}."
            )
        return size

    def replicas_for(self, limit: int, replica_devices: int = 1) -> int | None:
        """Returns the largest number of replicas that divides the global batch.

        Args:
          limit: Largest number of replicas that can run.
          replica_devices: Devices of a replica, each of which may take rows.

        Returns:
          Number of replicas; None if it would be below `min_replicas`.
        """
        for replicas in range(min(limit, self.max_replicas), self.min_replicas - 1, -1):
            rows = self.global_batch
            divides = rows is not None and rows % (replicas * replica_devices) == 0
            if divides or self.max_replicas % replicas == 0:
                return replicas
        return None


def parse_range(text: str) -> tuple[int, int]:
    """Returns the two numbers of MIN:MAX.

    Args:
      text: Value of `--elastic`.

    Raises:
      ValueError: If `text` is not two integers joined by a colon.
    """
    found = re.fullmatch(r"(\d+):(\d+)", text)
    if found is None:
        raise ValueError(
            f"--elastic {text}: MIN:MAX, the least and the largest number of replicas, "
            "such as 2:4."
        )
    return int(found[1]), int(found[2])


@dataclasses.dataclass(frozen=True)
class Places:
    """Places of processes on a machine, each with its GPU; some are left out.

    Attributes:
      count: Number of places.
      out_until: Time at which a place that was left out may be used again.
      deaths: Number of deaths at a place.
    """

    count: int
    out_until: Mapping[int, float] = dataclasses.field(default_factory=dict)
    deaths: Mapping[int, int] = dataclasses.field(default_factory=dict)

    def usable(self, now: float) -> tuple[int, ...]:
        """Returns the places that may be used.

        Args:
          now: Current time; all times are seconds of one clock.
        """
        places = range(self.count)
        return tuple(p for p in places if self.out_until.get(p, -math.inf) <= now)

    def leave_out(self, dead: Iterable[int], now: float, rejoin_secs: float) -> Places:
        """Returns the places after deaths.

        Args:
          dead: Places of the processes that died.
          now: Current time.
          rejoin_secs: Time for which a place is left out after its first death.
        """
        until, deaths = dict(self.out_until), dict(self.deaths)
        for place in dead:
            until[place] = now + rejoin_secs * 2.0 ** min(
                deaths.get(place, 0), _MAX_DOUBLINGS
            )
            deaths[place] = deaths.get(place, 0) + 1
        return Places(self.count, until, deaths)

    def all_back(self) -> Places:
        """Returns the places with none left out."""
        return Places(self.count, {}, self.deaths)

    def may_return(self, now: float) -> bool:
        """Returns whether a place that is left out returns by itself."""
        return any(now < until < math.inf for until in self.out_until.values())
