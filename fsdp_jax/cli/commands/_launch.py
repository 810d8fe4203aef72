"""`fsdp-jax launch`: runs several processes of a program on this machine."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Annotated

import tyro
from rich.text import Text

from fsdp_jax._streams import LenientConsole
from fsdp_jax.cli._elastic import ElasticOptions
from fsdp_jax.cli._errors import ChildFailed
from fsdp_jax.cli._options import Group, Unset
from fsdp_jax.launch import ElasticConfig, ElasticProcesses, Processes, Timeouts

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


@dataclasses.dataclass(frozen=True)
class Launch:
    """Run a program as a job of several processes on this machine.

    The program calls fsdp_jax.initialize() before anything else of jax; `fsdp-jax
    train`, `import` and `export` do. Every line it prints has its process before it.
    When one process fails, all are ended, and the exit status is that of the first.

        fsdp-jax launch --processes 4 -- python train.py --steps 100

    With --elastic MIN:MAX they are started again when one dies, at the program's newest
    step, with as many replicas of the model as can run, and with all of them when the
    place of the dead one may be used again.

        fsdp-jax launch --processes 4 --elastic 2:4 -- fsdp-jax train --dp-outer 4 ...

    Attributes:
      command: Program and its arguments, after a --.
      processes: Number of processes.
      devices_per_process: Simulate so many CPU devices in each; default a GPU each.
      elastic: Restarts.
      timeouts: Timeouts.
    """

    command: tyro.conf.Positional[tuple[str, ...]]
    processes: int
    devices_per_process: Unset[int] = None
    elastic: Annotated[ElasticOptions, Group] = ElasticOptions()
    timeouts: Annotated[Timeouts, tyro.conf.arg(name="")] = Timeouts()

    def run(self) -> None:
        """Runs the job, and passes SIGTERM on to it."""
        if not self.command:
            raise ValueError(
                "No program given: pass it after `--`, such as `-- python train.py`."
            )
        config = self.elastic.config(os.environ)
        status = self._run_once() if config is None else self._run_elastic(config)
        if status:
            raise ChildFailed(status)

    def _run_once(self) -> int:
        relay = _SignalRelay()
        # Outermost: the processes have sessions of their own, and would outlive a
        # launcher that SIGTERM ends while they start or are being ended.
        with (
            _handling(signal.SIGTERM, relay.send),
            Processes(
                self.command,
                self.processes,
                line=_Printer(),
                devices_per_process=self.devices_per_process,
                timeouts=self.timeouts,
            ) as job,
        ):
            relay.connect(job)
            return job.wait()

    def _run_elastic(self, config: ElasticConfig) -> int:
        job = ElasticProcesses(
            self.command,
            self.processes,
            config,
            line=_Printer(),
            devices_per_process=self.devices_per_process,
            timeouts=self.timeouts,
        )
        with (
            _handling(signal.SIGTERM, job.stop),
            _handling(signal.SIGUSR1, lambda _: job.grow()),
        ):
            return job.run()


class _SignalRelay:
    """Passes signals on to a job, those too that come while it starts."""

    def __init__(self):
        self._job: Processes | None = None
        self._early: int | None = None

    def send(self, number: int) -> None:
        """Sends a signal now, or when the job has started."""
        if self._job is None:
            self._early = number
        else:
            self._job.signal(number)

    def connect(self, job: Processes) -> None:
        """Sets the job, and sends it the signal that came before."""
        self._job = job
        if self._early is not None:
            job.signal(self._early)


class _Printer:
    """Prints lines of several processes; from threads, so each in one piece."""

    def __init__(self):
        self._consoles = [
            LenientConsole(file=file, highlight=False, soft_wrap=True)
            for file in (sys.stdout, sys.stderr)
        ]

    def __call__(self, rank: int, line: str, is_error: bool) -> None:
        colour = _COLOURS[rank % len(_COLOURS)] if rank >= 0 else "bold"
        name = str(rank) if rank >= 0 else "launch"
        text = Text.assemble((f"[{name}] ", colour), Text.from_ansi(line))
        self._consoles[is_error].print(text)


@contextmanager
def _handling(number: int, handle: Callable[[int], None]) -> Iterator[None]:
    """Installs a signal handler for the duration of the block."""

    def call(number: int, frame: FrameType | None) -> None:
        handle(number)

    before = signal.signal(number, call)
    try:
        yield
    finally:
        signal.signal(number, before)
