"""Processes of a job as seen by the coordinator, with checks for silence and stalls."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence

from fsdp_jax.launch._handshake import Handshake
from fsdp_jax.launch._progress import TRAIN_STEP
from fsdp_jax.launch._protocol import Message

_MOST_NAMED = 8


@dataclasses.dataclass
class Member:
    """A connected process.

    Attributes:
      handshake: Handshake message of the process.
      send: Function that sends it a message.
      heard: Time of its last message; all times are the coordinator's.
      moved: Time at which it last began something.
      step: Training step that it last reported; None if none.
      phase: Phase that it last reported.
      has_trained: Whether it has reported a training step.
      left: Whether it has reported that its program ended or failed.
      gone: Whether its connection is closed.
    """

    handshake: Handshake
    send: Callable[[Message], None]
    heard: float
    moved: float
    step: int | None = None
    phase: str = "starting"
    has_trained: bool = False
    left: bool = False
    gone: bool = False

    def beat(self, message: Message, now: float) -> None:
        """Handles a heartbeat: `{"step": ..., "phase": ..., "secs": in the phase}`."""
        self.heard = now
        self.step, self.phase = message["step"], message["phase"]
        self.has_trained |= self.step is not None or self.phase.endswith(TRAIN_STEP)
        self.moved = max(self.moved, now - message["secs"])

    def where(self, now: float) -> str:
        """Describes its position."""
        step = "" if self.step is None else f"step {self.step}, "
        if self.left:
            return f"{step}'{self.phase}', and its program has ended"
        return f"{step}'{self.phase}' for {now - self.moved:.0f} s"


def silent(members: Sequence[Member], now: float, secs: float) -> list[Member]:
    """Returns the processes without a message for `secs`."""
    return [m for m in members if not m.left and now - m.heard > secs]


def describe_silent(members: Sequence[Member], now: float) -> list[str]:
    """Describes each silent process, one line each."""
    return [
        f"{member.handshake} gave no sign of life for {now - member.heard:.0f} s (is "
        f"it stopped, or its machine gone?), in {member.where(member.heard)}"
        for member in members
    ]


def standstill(members: Sequence[Member], now: float) -> float:
    """Returns the seconds without progress in any process; 0 if none is running."""
    moved = [member.moved for member in members if not member.left]
    return now - max(moved) if moved else 0.0


def positions(members: Sequence[Member], now: float) -> str:
    """Describes all positions, smallest group first: the others wait for it."""
    places = defaultdict(list)
    for member in members:
        places[member.step, member.phase, member.left].append(member)
    groups = sorted(places.values(), key=lambda group: (len(group), group[0].moved))
    return "\n".join(f"  {_names(group)}: {group[0].where(now)}" for group in groups)


def _names(group: Sequence[Member]) -> str:
    handshakes = sorted(
        (member.handshake for member in group), key=lambda handshake: handshake.rank
    )
    shown = ", ".join(map(str, handshakes[:_MOST_NAMED]))
    more = len(handshakes) - _MOST_NAMED
    return shown if more <= 0 else f"{shown} and {more} more"
