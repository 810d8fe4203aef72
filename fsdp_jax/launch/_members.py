"""The processes of a job as the coordinator sees them, and who of them is late."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence

from fsdp_jax.launch._handshake import Claim
from fsdp_jax.launch._protocol import Message

_MOST_NAMED = 8


@dataclasses.dataclass
class Member:
    """A process that has come.

    Attributes:
      claim: What it said of itself.
      send: Sends it a message.
      heard: When it was heard of last; all times are the coordinator's.
      moved: When it was last seen to begin something.
      step: Where it stands then, as it says.
      phase: The same.
      left: Whether its program has ended or failed, by its own word.
      gone: Whether its connection has ended.
    """

    claim: Claim
    send: Callable[[Message], None]
    heard: float
    moved: float
    step: int | None = None
    phase: str = "starting"
    left: bool = False
    gone: bool = False

    def beat(self, message: Message, now: float) -> None:
        """Takes a sign of life, `{"step": ..., "phase": ..., "secs": since when}`."""
        self.heard = now
        self.step, self.phase = message["step"], message["phase"]
        self.moved = max(self.moved, now - message["secs"])

    def where(self, now: float) -> str:
        """Its position in words."""
        step = "" if self.step is None else f"step {self.step}, "
        if self.left:
            return f"{step}'{self.phase}', and its program has ended"
        return f"{step}'{self.phase}' for {now - self.moved:.0f} s"


def silent(members: Sequence[Member], now: float, secs: float) -> list[str]:
    """Who was not heard of for so long, one line each."""
    return [
        f"{member.claim} gave no sign of life for {now - member.heard:.0f} s (is it "
        f"stopped, or its machine gone?), in {member.where(member.heard)}"
        for member in members
        if not member.left and now - member.heard > secs
    ]


def standstill(members: Sequence[Member], now: float) -> float:
    """Seconds in which no process began anything; 0 where none is at work."""
    moved = [member.moved for member in members if not member.left]
    return now - max(moved) if moved else 0.0


def positions(members: Sequence[Member], now: float) -> str:
    """Where everyone stands: the fewest in one place first, since these are awaited."""
    places = defaultdict(list)
    for member in members:
        places[member.step, member.phase, member.left].append(member)
    groups = sorted(places.values(), key=lambda group: (len(group), group[0].moved))
    return "\n".join(f"  {_names(group)}: {group[0].where(now)}" for group in groups)


def _names(group: Sequence[Member]) -> str:
    claims = sorted((member.claim for member in group), key=lambda claim: claim.rank)
    shown = ", ".join(map(str, claims[:_MOST_NAMED]))
    more = len(claims) - _MOST_NAMED
    return shown if more <= 0 else f"{shown} and {more} more"
