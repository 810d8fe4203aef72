"""Runs an elastic job whose processes are killed at chosen moments, and looks at it.

```
with ElasticRun(folder, steps=14) as run:
    death = run.kill("save", after_step=3, chance=random.Random(0))
    run.await_step_after(death)
```
The program is `examples/elastic_replicas.py`: 4 processes with 2 simulated devices.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
from helpers.processes import ENVIRONMENT, ROOT

import fsdp_jax as fsdp
from fsdp_jax.launch import ElasticConfig, ElasticProcesses

PROGRAM = ROOT / "examples" / "elastic_replicas.py"
PROCESSES, DEVICES, BATCH = 4, 2, 16
PHASES = {
    "step": r"call \d+ of the train step|training",
    "save": "Saving",
    "load": "Opening the local checkpoints|Loading|Looking",
}
"""Moment of a kill -> phases of the victim in which it is sent."""
VICTIMS: dict[str, Callable[[random.Random, int], list[int]]] = {
    "one": lambda chance, count: [chance.randrange(count)],
    "two at once": lambda chance, count: chance.sample(range(count), 2),
    "rank 0": lambda chance, count: [0],
}
"""Kind of a kill -> ranks of the processes, of as many as run."""
_POLL_SECS = 0.01
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Death:
    """A process that was killed.

    Attributes:
      phase: Phase that it had last reported.
      at: Time of the kill.
      saved: Newest step that was complete on the disks then; 0 for none.
      lines: Number of losses written before.
      generation: Number of its generation.
    """

    phase: str
    at: float
    saved: int
    lines: int
    generation: int


class ElasticRun:
    """An elastic job of the example, in a folder."""

    def __init__(self, folder: Path, steps: int, config: ElasticConfig | None = None):
        """Writes the data, and starts the job in a thread.

        Args:
          folder: Empty folder.
          steps: Last step.
          config: Limits; default from 1 to 4 replicas, and places that do not return.
        """
        self.folder, self.lines = folder, list[tuple[int, str]]()
        self.status: int | None = None
        rows = np.random.default_rng(0).normal(size=(128, 16)).astype(np.float32)
        np.save(folder / "rows.npy", rows)
        paths = {"rows": "rows.npy", "save": "run", "local": "local"}
        paths |= {"losses": "losses.jsonl"}
        options = [f"--{name}={folder / path}" for name, path in paths.items()]
        options += [f"--steps={steps}", f"--batch={BATCH}", "--save-every=5"]
        limits = ElasticConfig(1, PROCESSES, rejoin_secs=float("inf"))
        self.job = ElasticProcesses(
            [sys.executable, str(PROGRAM), *options, "--layers=2"],
            PROCESSES,
            config or limits,
            line=lambda rank, text, is_error: self.lines.append((rank, text)),
            devices_per_process=DEVICES,
            environment=ENVIRONMENT,
        )
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> ElasticRun:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.job.stop(signal.SIGKILL)
        self._thread.join(60)

    def kill(
        self,
        moment: str,
        *,
        after_step: int,
        chance: random.Random,
        victims: str = "one",
    ) -> Death:
        """Kills processes at a moment.

        Args:
          moment: Key of `PHASES`, of the first victim.
          after_step: Step that is written before; 0 for any.
          chance: Source of the processes and of a delay within the phase.
          victims: Key of `VICTIMS`.
        """
        self.await_that(lambda: self.last_step() >= after_step)
        pattern = re.compile(PHASES[moment])
        ranks = VICTIMS[victims](chance, self._num_running())
        rank = ranks[0]
        self.await_that(lambda: pattern.match(self._phase(rank)))
        time.sleep(chance.uniform(0, 0.2 if moment == "step" else 0.01))
        processes = self.job.processes
        assert processes is not None, self.said
        number, pids = len(processes.pids), [processes.pids[each] for each in ranks]
        death = Death(
            self._phase(rank),
            time.monotonic(),
            self._saved_step(number),
            len(self.losses()),
            self.generation(),
        )
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        self.await_that(lambda: self.generation() > death.generation)
        # Steps may have been written between the look and the kill.
        return dataclasses.replace(death, lines=len(self.losses()))

    def await_step_after(self, death: Death) -> tuple[int, float]:
        """Returns the first step after a kill, and the seconds until it was written."""
        self.await_that(lambda: len(self.losses()) > death.lines)
        secs = time.monotonic() - death.at
        return self.losses()[death.lines][0], secs

    def await_that(self, holds: Callable[[], _T], secs: float = 300) -> _T:
        """Returns what a function returns when that is true.

        Raises:
          AssertionError: If the job ends before, or the time is over.
        """
        end = time.monotonic() + secs
        while not (found := holds()):
            assert self.status is None and time.monotonic() < end, self.said
            time.sleep(_POLL_SECS)
        return found

    def wait(self, secs: float = 300) -> int | None:
        """Returns the status of the job, when it has ended."""
        self._thread.join(secs)
        return self.status

    def losses(self) -> list[tuple[int, float]]:
        """Step and loss of each line that is written in full."""
        path = self.folder / "losses.jsonl"
        if not path.exists():
            return []
        whole, _, _ = path.read_text().rpartition("\n")
        return [(x["step"], x["loss"]) for x in map(json.loads, whole.splitlines())]

    def last_step(self) -> int:
        """Step of the last line; 0 for none."""
        return max((step for step, _ in self.losses()), default=0)

    def generation(self) -> int:
        """Number of the newest generation."""
        said = [text for rank, text in self.lines if rank == -1]
        return sum(bool(re.match(r"generation \d+ starts", text)) for text in said)

    def pids(self) -> list[int]:
        """Its processes, by rank; none between generations."""
        processes = self.job.processes
        return [] if processes is None else processes.pids

    @staticmethod
    def moment_of(death: Death) -> str:
        """Returns the key of `PHASES` whose phase the process was in; "" for others."""
        return next((m for m, p in PHASES.items() if re.match(p, death.phase)), "")

    @property
    def said(self) -> str:
        """All that the job wrote, to be shown."""
        return "\n".join(f"[{rank}] {text}" for rank, text in list(self.lines))

    def _run(self) -> None:
        self.status = self.job.run()

    def _num_running(self) -> int:
        processes = self.await_that(lambda: self.job.processes)
        return len(processes.pids)

    def _phase(self, rank: int) -> str:
        processes = self.job.processes
        found = [] if processes is None else processes.positions
        return next((phase for one, _, phase in found if one == rank), "")

    def _saved_step(self, num_processes: int) -> int:
        """Returns the newest step of which each process's file is there."""
        files = list((self.folder / "local").glob("*/*-*/*.shards"))
        folders = Counter(file.parent for file in files)
        whole = [f for f, count in folders.items() if count >= num_processes]
        local = (int(folder.name.partition("-")[0]) for folder in whole)
        return max([fsdp.latest_step(self.folder / "run") or 0, *local])
