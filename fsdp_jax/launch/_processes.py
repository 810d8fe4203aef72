"""Processes of a job on this machine: started together, and ended together."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import TextIO

from fsdp_jax.launch._cluster import HOSTED, TOKEN
from fsdp_jax.launch._coordinator import Coordinator
from fsdp_jax.launch._exit_status import is_failure
from fsdp_jax.launch._timeouts import Timeouts

Line = Callable[[int, str, bool], None]

# Time for processes to print the reason and exit by themselves when one has died.
_TOLD_SECS = 5.0
# Time between SIGTERM and SIGKILL.
_TERM_SECS = 5.0
_POLL_SECS = 0.05
# Status of a process that ended itself, as jax, XLA and NCCL end survivors.
_ABORTED = -signal.SIGABRT


class Processes:
    """Job of several processes of one command, on this machine.

    ```
    with Processes(["python", "train.py"], 4, devices_per_process=2, line=show) as job:
        status = job.wait()
    ```

    It runs the coordinator of the job, at a free port. After the `with` block neither
    the processes nor their children are running, except for children that created a
    session of their own.
    """

    def __init__(
        self,
        command: Sequence[str],
        num_processes: int,
        *,
        line: Line,
        devices_per_process: int | None = None,
        timeouts: Timeouts | None = None,
        environment: dict[str, str] | None = None,
        local_ranks: Sequence[int] | None = None,
    ):
        """Starts the processes.

        Args:
          command: Program and its arguments.
          num_processes: Number of processes.
          line: Callback for each line of output, called from threads with the rank (-1
            for messages about the job), the line, and whether it is from stderr.
          devices_per_process: Number of CPU devices to simulate in each process; None
            for one GPU each.
          timeouts: Timeouts of the job.
          environment: Environment variables; default those of this process.
          local_ranks: Index of the GPU of each process, which messages call its place;
            default its rank.

        Raises:
          ValueError: If the program does not exist, or a number is not positive.
        """
        _check(num_processes, devices_per_process)
        self._line = line
        self._crashed: frozenset[int] = frozenset()
        self._local_ranks = local_ranks
        self._failed_at: float | None = None
        is_ignored = signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
        if is_ignored and threading.current_thread() is threading.main_thread():
            # As some supervisors leave it: the statuses of children would be lost.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._children: list[subprocess.Popen[str]] = []
        self._readers: list[threading.Thread] = []
        self._token = secrets.token_hex(16)
        self._coordinator = Coordinator(
            num_processes, timeouts=timeouts, report=self._report, token=self._token
        )
        base = dict(os.environ if environment is None else environment)
        base |= self._variables(num_processes, devices_per_process)
        try:
            for rank, local in enumerate(local_ranks or range(num_processes)):
                self._start(
                    command, rank, base | {"RANK": str(rank), "LOCAL_RANK": str(local)}
                )
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process id of each process, by rank."""
        return [child.pid for child in self._children]

    @property
    def statuses(self) -> list[int | None]:
        """Exit status of each process, minus a signal's number, None if running."""
        return [_status(child) for child in self._children]

    @property
    def blamed(self) -> frozenset[int]:
        """Ranks of the processes that are the reason why `wait` returned an error.

        Empty if all stalled. Processes that ended as an effect are not among them, such
        as those that SIGABRT ended when another process was killed or had failed with
        an error: jax, XLA and NCCL abort the survivors. An abort alone is a reason.
        """
        if not self._crashed:
            return self._coordinator.blamed
        aborted = {rank for rank, s in enumerate(self.statuses) if s == _ABORTED}
        return self._crashed | self._coordinator.blamed - aborted

    @property
    def failed_at(self) -> float | None:
        """Time by `time.monotonic` at which `wait` saw a process fail."""
        return self._failed_at

    @property
    def positions(self) -> list[tuple[int, int | None, str]]:
        """Rank, training step and phase that each process last reported."""
        return self._coordinator.positions

    @property
    def has_trained(self) -> bool:
        """Whether any process has reported a training step."""
        return self._coordinator.has_trained

    def wait(self, timeout_secs: float | None = None) -> int:
        """Waits until all have succeeded, or one has failed, and then ends the others.

        Args:
          timeout_secs: Timeout in seconds; None to wait forever.

        Returns:
          0; or the status of the first that failed, 128 plus the number for a signal;
          of several that are seen at once, one that another signal than SIGABRT ended,
          or else one with an error.

        Raises:
          TimeoutError: After `timeout_secs`; the processes keep running.
        """
        end = None if timeout_secs is None else time.monotonic() + timeout_secs
        while True:
            states = self.statuses
            failed = {rank: status for rank, status in enumerate(states) if status}
            if failed:
                first = min(failed, key=lambda rank: _order_as_cause(failed[rank]))
                self._failed_at = time.monotonic()
                self._crashed = frozenset(
                    rank for rank, status in failed.items() if _is_killed(status)
                )
                return self._end_the_others(first, failed[first])
            if all(status is not None for status in states):
                return 0
            if end is not None and time.monotonic() > end:
                raise TimeoutError(f"not all had ended after {timeout_secs} s")
            time.sleep(_POLL_SECS)

    def signal(self, number: int) -> None:
        """Sends a signal to each process and its children."""
        for child in self._children:
            _signal(child, number)

    def close(self) -> None:
        """Ends all processes that are still running."""
        if None in self.statuses:
            self.signal(signal.SIGTERM)
            self._wait_for_all(_TERM_SECS)
        self.signal(signal.SIGKILL)
        for child in self._children:
            child.wait()
        for reader in self._readers:
            reader.join(timeout=5)
        self._coordinator.close()

    def _variables(self, num_processes: int, devices: int | None) -> dict[str, str]:
        """Returns torchrun's environment variables, and that of a coordinator here."""
        size = str(num_processes)
        variables = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._coordinator.port),
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            HOSTED: "1",
            TOKEN: self._token,
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "PYTHONUNBUFFERED": "1",  # else the last output of a killed process is lost
        }
        if devices is not None:
            variables |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
        return variables

    def _start(
        self, command: Sequence[str], rank: int, environment: dict[str, str]
    ) -> None:
        try:
            child = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,  # so that signals reach its children too
            )
        except OSError as error:
            raise ValueError(f"'{command[0]}' cannot be started: {error}.") from error
        self._children.append(child)
        assert child.stdout is not None and child.stderr is not None
        for stream, is_error in ((child.stdout, False), (child.stderr, True)):
            reader = threading.Thread(
                target=self._read, args=(rank, stream, is_error), daemon=True
            )
            reader.start()
            self._readers.append(reader)

    def _read(self, rank: int, stream: TextIO, is_error: bool) -> None:
        with stream:
            for line in stream:
                self._line(rank, line.rstrip("\n"), is_error)

    def _report(self, text: str) -> None:
        self._line(-1, text, True)

    def _end_the_others(self, rank: int, status: int) -> int:
        """Gives the others time to print the reason, then ends them."""
        how = f"ended with status {status}"
        if status < 0:
            how = f"was ended by {signal.Signals(-status).name}"
        self._coordinator.announce(rank, how, is_abort=status == _ABORTED)
        self._report(f"{self._describe(rank)} {how}; ending the others")
        self._wait_for_all(_TOLD_SECS)
        if self._crashed:
            # Of those that are killed together, one may be seen to end first. Survivors
            # may end by other signals when the job is torn down, but not by this one.
            self._crashed |= {
                rank for rank, s in enumerate(self.statuses) if s == -signal.SIGKILL
            }
        self.close()
        return _job_status(status, [self.statuses[cause] for cause in self.blamed])

    def _describe(self, rank: int) -> str:
        pid, places = self._children[rank].pid, self._local_ranks
        place = "" if places is None else f"place {places[rank]}, "
        return f"process {rank} ({place}pid {pid})"

    def _wait_for_all(self, secs: float) -> None:
        end = time.monotonic() + secs
        while time.monotonic() < end:
            if None not in self.statuses:
                return
            time.sleep(_POLL_SECS)


def _is_killed(status: int) -> bool:
    """Returns whether a signal that survivors do not die of ended a process."""
    return status < 0 and status != _ABORTED


def _order_as_cause(status: int) -> int:
    """Returns 0 for the most likely reason of other failures, 2 for the least."""
    if _is_killed(status):
        return 0
    return 2 if status == _ABORTED else 1


def _job_status(status: int, blamed: Sequence[int | None]) -> int:
    """Returns the status of the job, 128 plus the number for a signal.

    Args:
      status: Status of the process that was seen to fail.
      blamed: Statuses of the processes that are the reason. Of an abort that is an
        error, whose status is the job's; that of a signal is of a process ended here.
    """
    if status == _ABORTED:
        errors = [error for error in blamed if error and is_failure(error)]
        status = min(errors, default=status)
    return 128 - status if status < 0 else status


def _check(num_processes: int, devices: int | None) -> None:
    for name, number in (
        ("processes", num_processes),
        ("devices per process", devices),
    ):
        if number is not None and number < 1:
            raise ValueError(f"The number of {name} must be at least 1, got {number}.")


def _status(child: subprocess.Popen[str]) -> int | None:
    """Returns the exit status without reaping: the zombie keeps its process group id.

    A signal to the group therefore cannot reach another program.
    """
    if child.returncode is not None:
        return child.returncode
    # WNOWAIT: leaves the zombie. Popen.poll would reap it and free its pid.
    ended = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _signal(child: subprocess.Popen[str], number: int) -> None:
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, number)
