"""State machine of the coordinator: members, start, failures and end of a job."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fsdp_jax.launch._handshake import Handshake, numbers, problems
from fsdp_jax.launch._members import (
    Member,
    describe_silent,
    positions,
    silent,
    standstill,
)
from fsdp_jax.launch._protocol import Message
from fsdp_jax.launch._timeouts import Timeouts

# Wait after a contradiction, so that one message covers the processes still to come.
_SETTLE_SECS = 1.0
# Wait before an error is broadcast: it may be the effect of another process's death,
# which is detected a moment later and is the reason that all should print.
_EFFECT_SECS = 0.5
# Maximum interval between reports of missing processes.
_MISSING_SECS = 30.0
# Handshakes beyond twice the processes of the job that are taken, to name doubles.
_MAX_DOUBLES = 16
# What a program can do whose last work takes long.
_REPORTS = (
    "A process had ended, and the others may wait for it. If one was at work, let it "
    "call fsdp_jax.launch.report_progress, or set Timeouts(left_secs=)."
)


class CoordinatorState:
    """State and decisions of the coordinator; time and messages are passed in.

    Attributes:
      members: Processes that have connected, without those that left before the start.
      blamed: Ranks of the processes whose failure, death or silence ended the job;
        empty while it runs, and after a stall of all.
    """

    def __init__(
        self,
        num_processes: int,
        timeouts: Timeouts,
        report: Callable[[str], None],
        now: float,
    ):
        """Begins to wait for processes.

        Args:
          num_processes: Number of processes of the job.
          timeouts: Timeouts of the job.
          report: Callback for messages about a waiting job.
          now: Current time; all times are seconds of one clock.
        """
        self.members: list[Member] = []
        self.blamed: frozenset[int] = frozenset()
        self._num_processes = num_processes
        self._timeouts = timeouts
        self._report = report
        self._began = self._reported = now
        self._contradicted: float | None = None
        self._failure: tuple[Member, str, float] | None = None  # the first, and when
        self._verdict: str | None = None  # why the job does not start, or ends
        self._started = False

    @property
    def all_connected(self) -> bool:
        """Whether all processes have connected."""
        return len(self.members) >= self._num_processes

    def admit(
        self, handshake: Handshake, send: Callable[[Message], None], now: float
    ) -> Member | None:
        """Adds a process, and starts the job if it is the last; None if refused."""
        if self._started:
            send({"refused": self._late_refusal(handshake)})
            return None
        if len(self.members) >= 2 * self._num_processes + _MAX_DOUBLES:
            send(
                {"refused": f"{handshake} is one of {len(self.members) + 1} processes."}
            )
            return None
        member = Member(handshake, send, heard=now, moved=now)
        self.members.append(member)
        if self._verdict is not None:
            send({"refused": self._verdict})
        elif self._contradicted is None and self._problems():
            self._contradicted = now
        elif self._contradicted is None and self.all_connected:
            self._start(now)
        return member

    def handle_message(self, member: Member, message: Message, now: float) -> None:
        """Handles a message of a process."""
        member.heard = now
        if "phase" in message:
            member.beat(message, now)
        elif "failed" in message:
            where = f"{member.handshake} failed in {member.where(now)}"
            text = f"{where}:\n  {message['failed']}"
            member.left = True
            if self._verdict is None:  # Later errors are effects.
                self._failure = self._failure or (member, text, now)
        else:
            member.left, member.moved = True, now

    def handle_disconnect(self, member: Member, now: float) -> None:
        """Handles a closed connection: the process has left, or it died."""
        if not self._started:
            if self._verdict is None:
                self.members.remove(member)
            return
        member.gone = True
        if not member.left:
            self.end(
                f"{member.handshake} ended without a word (was it killed?), in "
                f"{member.where(now)}",
                blamed=[member.handshake.rank],
            )

    def handle_exit(
        self, rank: int, how: str, now: float, *, is_abort: bool = False
    ) -> None:
        """Ends the job because a process was seen to end with an error.

        Its connection may close later; its last position is known already.

        Args:
          rank: Index of the process.
          how: Description of its end, used unless it reported an error itself.
          now: Current time.
          is_abort: Whether SIGABRT ended it; then an error that another process had
            reported before is the reason.
        """
        if self._failure is not None:
            member, text, _ = self._failure
            reporter = member.handshake.rank
            if is_abort and self.blamed == {rank}:
                # Its closed connection was seen before it was known how it had ended.
                self.blamed = frozenset([reporter])
            if is_abort or reporter == rank:
                self.end(text, known_to=member, blamed=[reporter])
                return
        found = [member for member in self.members if member.handshake.rank == rank]
        text = f"process {rank} {how}"
        if found:
            text = f"{found[0].handshake} {how}, in {found[0].where(now)}"
        self.end(text, blamed=[rank])

    def end(
        self,
        text: str,
        *,
        known_to: Member | None = None,
        blamed: Iterable[int] = (),
    ) -> None:
        """Ends the job; later calls are ignored, as effects of the first failure.

        Args:
          text: Reason.
          known_to: Process that reported it.
          blamed: Ranks of the processes that are the reason.
        """
        if self._verdict is not None:
            return
        self._verdict, self.blamed = text, frozenset(blamed)
        for member in self.members:
            if member is known_to:
                member.send({"noted": True})
            elif not member.gone:
                member.send({"end" if self._started else "refused": text})

    def add_suspension(self, secs: float) -> None:
        """Shifts all times by a period in which the coordinator itself was stopped."""
        self._began += secs
        self._reported += secs
        for member in self.members:
            member.heard += secs
            member.moved += secs

    def check_timeouts(self, now: float) -> None:
        """Checks the timeouts, and ends the job or reports if one has passed."""
        if self._verdict is not None:
            return
        if self._failure is not None:
            member, text, since = self._failure
            if now - since > _EFFECT_SECS:
                self.end(text, known_to=member, blamed=[member.handshake.rank])
        elif self._started:
            self._check_running(now)
        elif self._contradicted is None:
            self._check_start(now)
        elif now - self._contradicted > _SETTLE_SECS or self.all_connected:
            self._resolve_contradiction(now)

    def _resolve_contradiction(self, now: float) -> None:
        """Ends a job whose processes contradict each other still, or lets it start."""
        if problems := self._problems():
            found = "\n  ".join(problems)
            self.end(f"The processes do not agree; the job does not start:\n  {found}")
            return
        self._contradicted = None  # One of them has gone.
        if self.all_connected:
            self._start(now)

    def _check_running(self, now: float) -> None:
        timeouts, still = self._timeouts, standstill(self.members, now)
        if lost := silent(self.members, now, timeouts.silent_secs):
            texts = describe_silent(lost, now)
            self.end("\n  ".join(texts), blamed=[m.handshake.rank for m in lost])
        elif still > timeouts.stall_secs:
            self.end(self._standstill(now))
        elif still > timeouts.left_secs and self._any_left():
            self.end(f"{self._standstill(now)}\n{_REPORTS}")
        elif still > timeouts.report_secs < now - self._reported:
            self._reported = now
            self._report(self._standstill(now))

    def _check_start(self, now: float) -> None:
        here = {member.handshake.rank for member in self.members}
        missing = numbers(set(range(self._num_processes)) - here)
        waited = f"{now - self._began:.0f} s"
        if now - self._began > self._timeouts.start_secs:
            self.end(
                f"After {waited} {missing} of {self._num_processes} had not come. "
                "Start all of them, with the same address."
            )
        elif now - self._reported > min(_MISSING_SECS, self._timeouts.report_secs):
            self._reported = now
            self._report(f"waiting since {waited} for {missing}")

    def _start(self, now: float) -> None:
        self._started, self._reported = True, now
        (service,) = [
            m.handshake.service for m in self.members if m.handshake.rank == 0
        ]
        for member in self.members:
            member.heard = member.moved = now
            member.send({"service": service, "beat_secs": self._timeouts.beat_secs})

    def _problems(self) -> list[str]:
        handshakes = sorted(
            (m.handshake for m in self.members), key=lambda handshake: handshake.rank
        )
        return problems(handshakes, self._num_processes)

    def _any_left(self) -> bool:
        """Returns whether a process has left, for which others may be waiting."""
        return any(member.left for member in self.members)

    def _late_refusal(self, handshake: Handshake) -> str:
        there = [
            str(m.handshake) for m in self.members if m.handshake.rank == handshake.rank
        ]
        return (
            f"{handshake} comes to a job that runs already"
            f"{', with ' if there else ''}{', '.join(there)}. Restart all its "
            "processes together."
        )

    def _standstill(self, now: float) -> str:
        secs = standstill(self.members, now)
        return f"no process went on for {secs:.0f} s:\n{positions(self.members, now)}"
