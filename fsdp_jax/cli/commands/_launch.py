"""`fsdp-jax launch`: runs several processes of a program on this machine."""

from __future__ import annotations

import dataclasses
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Annotated

import tyro
from rich.text import Text

from fsdp_jax._streams import LenientConsole
from fsdp_jax.cli._errors import ChildFailed
from fsdp_jax.cli._options import Unset
from fsdp_jax.launch import Processes, Timeouts

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


@dataclasses.dataclass(frozen=True)
class Launch:
    """Run a program as a job of several processes on this machine.

    The program calls fsdp_jax.initialize() before anything else of jax; `fsdp-jax
    train`, `import` and `export` do. Every line it prints has its process before it.
    When one process fails, all are ended, and the exit status is that of the first.

        fsdp-jax launch --processes 4 -- python train.py --steps 100

    Attributes:
      command: Program and its arguments, after a --.
      processes: Number of processes.
      devices_per_process: Simulate so many CPU devices in each; default a GPU each.
      timeouts: Timeouts.
    """

    command: tyro.conf.Positional[tuple[str, ...]]
    processes: int
    devices_per_process: Unset[int] = None
    timeouts: Annotated[Timeouts, tyro.conf.arg(name="")] = Timeouts()

    def run(self) -> None:
        """Runs the job, and passes SIGTERM on to it."""
        if not self.command:
            raise ValueError("launch what? Give the program behind a --.")
        with (
            Processes(
                self.command,
                self.processes,
                line=_Printer(),
                devices_per_process=self.devices_per_process,
                timeouts=self.timeouts,
            ) as job,
            _passing_on_sigterm(job),
        ):
            status = job.wait()
        if status:
            raise ChildFailed(status)


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
def _passing_on_sigterm(job: Processes) -> Iterator[None]:
    """Forwards SIGTERM to the job, which may save before it ends."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        job.signal(number)

    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
