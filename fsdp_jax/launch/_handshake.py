"""Handshake of a process with the coordinator, and checks that all processes agree."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fsdp_jax.launch._protocol import Message

_LONGEST_SHOWN = 60
# Longest name or value in a handshake.
_LONGEST_TEXT = 1000
_LONGEST_HOST = 255


@dataclasses.dataclass(frozen=True)
class Handshake:
    """Handshake message of a process.

    Attributes:
      rank: Index of the process in the job.
      num_processes: Number of processes that it expects.
      host: Name of its machine.
      pid: Its process id there.
      service: Port that it reserves for jax's own service; 0 except in process 0.
      facts: Values that must be equal in all processes, as text.
    """

    rank: int
    num_processes: int
    host: str
    pid: int
    service: int
    facts: Mapping[str, str]

    def __str__(self) -> str:
        # It may come from anyone who reaches the port, and goes to a terminal.
        host = "".join(c if c.isprintable() else "?" for c in self.host[:_LONGEST_HOST])
        return f"process {self.rank} ({host}, pid {self.pid})"

    def to_message(self) -> Message:
        """Returns the message to send."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_message(message: Message) -> Handshake:
        """Parses a received message.

        Raises:
          ValueError: If it is not a handshake, field by field.
        """
        try:
            handshake = Handshake(**message)
        except TypeError as error:
            raise ValueError(f"no handshake of a process: {error}") from error
        numbers = (
            handshake.rank,
            handshake.num_processes,
            handshake.pid,
            handshake.service,
        )
        texts = [handshake.host]
        if isinstance(handshake.facts, dict):
            texts += [*handshake.facts, *handshake.facts.values()]
        if not (
            all(type(number) is int and abs(number) < 2**63 for number in numbers)
            and 0 <= handshake.service < 2**16
            and isinstance(handshake.facts, dict)
            and all(isinstance(t, str) and len(t) <= _LONGEST_TEXT for t in texts)
        ):
            raise ValueError(f"no handshake of a process: {message!r:.80}")
        return handshake


def as_facts(config: Any) -> dict[str, str]:
    """Returns the fields of a config as short text that can be compared and shown.

    Args:
      config: Dataclass or JSON value; a value that is neither is compared by its
        `repr`.
    """
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        config = dataclasses.asdict(config)
    fields = config if isinstance(config, Mapping) else {"config": config}
    return {str(name): _short(value) for name, value in fields.items()}


def problems(handshakes: Sequence[Handshake], num_processes: int) -> list[str]:
    """Returns all contradictions among processes, and with the coordinator.

    Args:
      handshakes: Handshakes of the connected processes.
      num_processes: Number of processes that the coordinator expects.
    """
    return [
        *_other_sizes(handshakes, num_processes),
        *_out_of_range(handshakes, num_processes),
        *_doubles(handshakes),
        *_other_facts(handshakes),
    ]


def numbers(ranks: Iterable[int]) -> str:
    """Formats ranks as `process 3`, or `processes 0, 1, 3`."""
    shown = sorted(ranks)
    word = "process" if len(shown) == 1 else "processes"
    return f"{word} {', '.join(map(str, shown))}"


def _other_sizes(handshakes: Sequence[Handshake], num_processes: int) -> list[str]:
    wrong = [
        handshake
        for handshake in handshakes
        if handshake.num_processes != num_processes
    ]
    return [
        f"{handshake} was told that the job has {handshake.num_processes} processes; "
        f"the coordinator was told {num_processes}"
        for handshake in wrong
    ]


def _out_of_range(handshakes: Sequence[Handshake], num_processes: int) -> list[str]:
    return [
        f"{handshake} is none of 0 to {num_processes - 1}"
        for handshake in handshakes
        if not 0 <= handshake.rank < num_processes
    ]


def _doubles(handshakes: Sequence[Handshake]) -> list[str]:
    by_rank = defaultdict(list)
    for handshake in handshakes:
        by_rank[handshake.rank].append(f"{handshake.host}, pid {handshake.pid}")
    return [
        f"process {rank} came {len(places)} times: {'; '.join(places)}"
        for rank, places in sorted(by_rank.items())
        if len(places) > 1
    ]


def _other_facts(handshakes: Sequence[Handshake]) -> list[str]:
    names = sorted({name for handshake in handshakes for name in handshake.facts})
    found = []
    for name in names:
        ranks = defaultdict(set)
        for handshake in handshakes:
            ranks[handshake.facts.get(name, "nothing")].add(handshake.rank)
        if len(ranks) > 1:
            shown = "; ".join(f"{value} in {numbers(r)}" for value, r in ranks.items())
            found.append(f"{name} differs: {shown}")
    return found


def _short(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=repr)
    if len(text) <= _LONGEST_SHOWN:
        return text
    return "sha256 " + hashlib.sha256(text.encode()).hexdigest()[:16]
