"""Elastic job on this machine: goes on with fewer replicas, and grows again."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Sequence

from fsdp_jax.launch._elastic_config import ElasticConfig, Places
from fsdp_jax.launch._exit_status import is_failure
from fsdp_jax.launch._generation import Generation
from fsdp_jax.launch._processes import Line, Processes
from fsdp_jax.launch._timeouts import Timeouts

# Statuses of processes that a signal ended are above.
_SIGNALS = 128
_STOPPED = _SIGNALS + signal.SIGTERM
# Interval between checks whether the job can grow or must stop.
_POLL_SECS = 0.25


@dataclasses.dataclass(frozen=True)
class _Outcome:
    """End of a generation.

    Attributes:
      status: Exit status of the job; None if it was stopped to grow.
      dead: Places of the processes that are the reason.
      failed_at: Time at which a process was seen to fail, or was told to stop.
      has_trained: Whether a process had reported a training step.
    """

    status: int | None
    dead: tuple[int, ...] = ()
    failed_at: float = 0.0
    has_trained: bool = False


class ElasticProcesses:
    """Job of several processes on this machine that goes on when one of them dies.

    ```
    config = ElasticConfig(min_replicas=2, max_replicas=4)
    job = ElasticProcesses(["python", "train.py"], 4, config, line=show)
    status = job.run()
    ```

    Processes run in generations. When one dies, the others of its generation are ended,
    and the next one starts with the largest number of replicas that the places left can
    run and that divides the global batch. When a place may be used again and more
    replicas can run, the program gets SIGTERM, saves its step and ends, as it does in
    `fsdp_jax.Checkpointer`, and the next generation goes on from there. The program
    finds its generation by `generation()`, and resumes from its newest step.

    A job also ends if its first generation fails with an error before any training
    step, since another start would fail the same, and on status 143, of a program that
    was told to stop.
    """

    def __init__(
        self,
        command: Sequence[str],
        num_processes: int,
        config: ElasticConfig,
        *,
        line: Line,
        devices_per_process: int | None = None,
        timeouts: Timeouts | None = None,
        environment: dict[str, str] | None = None,
    ):
        """Checks the numbers, and starts nothing yet.

        Args:
          command: Program and its arguments.
          num_processes: Number of processes of the complete job.
          config: Limits of the job.
          line: Callback for each line of output, as for `Processes`; rank -1 for events
            of the job.
          devices_per_process: Number of CPU devices to simulate in each process; None
            for one GPU each.
          timeouts: Timeouts of each generation.
          environment: Environment variables; default those of this process.

        Raises:
          ValueError: If the replicas do not divide the processes.
        """
        self._command, self._config, self._line = command, config, line
        self._replica_size = config.processes_per_replica(num_processes)
        self._devices, self._timeouts = devices_per_process, timeouts
        self._environment = dict(os.environ if environment is None else environment)
        self._places = Places(num_processes)
        # Signal handlers set these. A threading.Event would not do: its lock is held
        # while it is cleared, and a handler that sets it then waits for its own thread.
        self._stop_signal: int | None = None
        self._grow_requested = False
        self.processes: Processes | None = None
        """Processes of the generation that runs; None between generations."""

    def run(self) -> int:
        """Runs generations until one succeeds, or none can follow.

        Returns:
          0; or the status of the last generation, as of `Processes.wait`; 143 if the
          job was stopped.
        """
        number, restarts, previous = 0, 0, _Outcome(None)
        while True:
            replicas = self._await_replicas()
            if replicas is None:
                return previous.status or 0 if self._stop_signal is None else _STOPPED
            outcome = self._run_generation(number, replicas, previous)
            if outcome.status is None:
                number, previous = number + 1, dataclasses.replace(outcome, dead=())
                continue
            if outcome.status in (0, _STOPPED) or self._stop_signal is not None:
                return outcome.status
            is_error = is_failure(outcome.status)
            if number == 0 and is_error and not outcome.has_trained:
                return outcome.status
            if restarts == self._config.max_restarts:
                self._report(f"no restart is left of {restarts}: the job ends")
                return outcome.status
            number, restarts, previous = number + 1, restarts + 1, outcome
            self._places = self._places.leave_out(
                outcome.dead, time.monotonic(), self._config.rejoin_secs
            )

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Passes a signal on to the processes; no generation follows."""
        self._stop_signal = number
        processes = self.processes  # The thread of `run` may set it to None meanwhile.
        if processes is not None:
            processes.signal(number)

    def grow(self) -> None:
        """Makes all places usable again, those of dead processes too."""
        self._grow_requested = True

    def _run_generation(
        self, number: int, replicas: int, previous: _Outcome
    ) -> _Outcome:
        size = replicas * self._replica_size
        places = self._places.usable(time.monotonic())[:size]
        generation = Generation(
            number,
            replicas,
            self._config.max_replicas,
            global_batch=self._config.global_batch,
        )
        if number:
            self._report(
                f"generation {number} starts with {replicas} of "
                f"{generation.max_replicas} replicas, at places "
                f"{', '.join(map(str, places))}"
            )
        with Processes(
            self._command,
            size,
            line=self._line,
            devices_per_process=self._devices,
            timeouts=self._timeouts,
            environment=self._environment | generation.variables(),
            local_ranks=places,
        ) as processes:
            self.processes = processes
            try:
                if self._stop_signal is not None:  # It came while they were started.
                    processes.signal(self._stop_signal)
                return self._watch(processes, generation, places, previous)
            finally:
                self.processes = None

    def _watch(
        self,
        processes: Processes,
        generation: Generation,
        places: Sequence[int],
        previous: _Outcome,
    ) -> _Outcome:
        """Waits for the end of a generation, or ends it to grow."""
        seen = _FirstStep(generation, previous)
        while True:
            try:
                status = processes.wait(_POLL_SECS)
            except TimeoutError:
                if message := seen.look(processes.positions, time.monotonic()):
                    self._report(message)
                if self._can_grow(generation) and seen.may_be_ended(processes):
                    return self._stop_to_grow(processes, places)
                continue
            return _outcome_of(processes, status, places)

    def _stop_to_grow(self, processes: Processes, places: Sequence[int]) -> _Outcome:
        """Lets the program save its step and end."""
        usable = self._places.usable(time.monotonic())
        self._report(
            f"places {', '.join(map(str, usable))} may be used: stopping at the next "
            "step, to go on with more replicas"
        )
        processes.signal(signal.SIGTERM)
        stopped_at = time.monotonic()
        try:
            status = processes.wait(self._config.stop_secs)
        except TimeoutError:
            self._report(
                f"the program had not ended {self._config.stop_secs:g} s after SIGTERM "
                "and is killed: does it call Checkpointer.save after each step?"
            )
            status = _STOPPED
        if status == _STOPPED and self._stop_signal is None:
            return _Outcome(None, failed_at=stopped_at)
        return _outcome_of(processes, status, places)

    def _can_grow(self, generation: Generation) -> bool:
        self._take_back_places()
        if generation.is_complete or self._stop_signal is not None:
            return False
        possible = self._possible(time.monotonic())
        return possible is not None and possible > generation.num_replicas

    def _take_back_places(self) -> None:
        """Makes all places usable if `grow` was called."""
        if self._grow_requested:
            # Cleared first: a call from here on is served now or by the next look.
            self._grow_requested = False
            self._places = self._places.all_back()

    def _possible(self, now: float) -> int | None:
        """Returns the number of replicas that can run now."""
        devices = self._replica_size * (self._devices or 1)
        limit = len(self._places.usable(now)) // self._replica_size
        return self._config.replicas_for(limit, devices)

    def _await_replicas(self) -> int | None:
        """Returns the number of replicas to run; None if there will not be enough."""
        is_reported = False
        while self._stop_signal is None:
            self._take_back_places()
            now = time.monotonic()
            if (replicas := self._possible(now)) is not None:
                return replicas
            left = f"places {', '.join(map(str, self._places.usable(now))) or 'none'}"
            least = f"below the least of {self._config.min_replicas} replicas"
            if not self._places.may_return(now):
                self._report(
                    f"{left} are left, {least}, and no other returns by itself: the "
                    "job ends"
                )
                return None
            if not is_reported:
                self._report(f"{left} are left, {least}: waiting for others to return")
                is_reported = True
            time.sleep(_POLL_SECS)
        return None

    def _report(self, text: str) -> None:
        self._line(-1, text, True)


class _FirstStep:
    """Tells once when a generation after the first has done a step."""

    def __init__(self, generation: Generation, previous: _Outcome):
        self._generation, self._previous = generation, previous
        self._first: int | None = None
        self._is_over = generation.number == 0

    def may_be_ended(self, processes: Processes) -> bool:
        """Returns whether a step was done, or none will be told."""
        return processes.has_trained and (self._is_over or self._first is None)

    def look(
        self, positions: Sequence[tuple[int, int | None, str]], now: float
    ) -> str | None:
        """Returns the line about the step, in the first call after it."""
        steps = [step for _, step, _ in positions if step is not None]
        if self._is_over or not steps:
            return None
        self._first = min(steps) if self._first is None else self._first
        if max(steps) <= self._first:
            return None
        self._is_over = True
        generation, secs = self._generation, now - self._previous.failed_at
        return (
            f"generation {generation.number} has done step {self._first} with "
            f"{generation.num_replicas} of {generation.max_replicas} replicas, "
            f"{secs:.1f} s after generation {generation.number - 1} ended"
        )


def _outcome_of(processes: Processes, status: int, places: Sequence[int]) -> _Outcome:
    dead = tuple(places[rank] for rank in sorted(processes.blamed)) if status else ()
    failed_at = processes.failed_at or time.monotonic()
    return _Outcome(status, dead, failed_at, processes.has_trained)
