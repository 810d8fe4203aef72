"""Replays a compiled schedule on one compute stream and one communication stream."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

from fsdp_jax.hlo._parse import Computation, Instruction, Module
from fsdp_jax.hlo._replica_groups import Collective, collective_of
from fsdp_jax.planner._cost import compute_seconds, wire_seconds
from fsdp_jax.planner._gpu import CostModel


@dataclasses.dataclass(frozen=True)
class Span:
    """Work of a stream from `start` to `end`, in seconds since the step began."""

    start: float
    end: float
    name: str


@dataclasses.dataclass(frozen=True)
class Sent:
    """One run of a collective.

    Attributes:
      collective: Collective that ran.
      start: Second at which the communication stream began it.
      end: Second at which it completed.
      exposed: Seconds that the compute stream waited for it.
      depth: Number of enclosing loops.
    """

    collective: Collective
    start: float
    end: float
    exposed: float
    depth: int


@dataclasses.dataclass(frozen=True)
class Timeline:
    """One step of one device.

    Attributes:
      seconds: Duration of the step, from the first instruction to the last.
      compute: Spans of the compute stream in order; adjacent spans of a name are
        joined.
      sent: Runs of collectives in order.
    """

    seconds: float
    compute: tuple[Span, ...]
    sent: tuple[Sent, ...]

    @property
    def compute_seconds(self) -> float:
        """Seconds that the compute stream was busy."""
        return sum(span.end - span.start for span in self.compute)

    @property
    def wire_seconds(self) -> float:
        """Seconds that the communication stream was busy."""
        return sum(sent.end - sent.start for sent in self.sent)

    @property
    def exposed_seconds(self) -> float:
        """Seconds that the compute stream waited for communication."""
        return sum(sent.exposed for sent in self.sent)


def replay(module: Module, cost: CostModel, num_devices: int) -> Timeline:
    """Replays a scheduled module on a cost model.

    Both streams take their work in the order of the schedule. An asynchronous
    collective begins when the compute stream has reached its start and the
    communication stream is free; the compute stream waits at its `-done`. Synchronous
    collectives are waited for at once.

    Args:
      module: Scheduled module (`is_scheduled=true`), compiled for `num_devices`.
      cost: Speeds of both streams.
      num_devices: Number of devices of the mesh.
    """
    player = _Player(module, cost, num_devices)
    player.play(module[module.entry])
    player.finish()
    return Timeline(player.now, tuple(player.compute), tuple(player.sent))


class _Player:
    """Clocks of both streams, and the collectives in flight."""

    def __init__(self, module: Module, cost: CostModel, num_devices: int):
        self.module = module
        self.cost = cost
        self.num_devices = num_devices
        self.now = 0.0
        # Second at which the communication stream is free.
        self.wire_free = 0.0
        self.depth = 0
        self.iteration = 0
        self.compute: list[Span] = []
        self.sent: list[Sent] = []
        # Name of a started collective -> its position in `sent`.
        self.under_way: dict[str, int] = {}
        # Name of a computation -> what each of its instructions does to the streams.
        self.steps: dict[str, list[Callable[[], None]]] = {}
        # Name of a branch -> its seconds.
        self.alone: dict[str, float] = {}

    def play(self, computation: Computation) -> None:
        # Parse each instruction once: a loop may run it a thousand times.
        if computation.name not in self.steps:
            labels = _labels(computation, in_loop=self.depth > 0)
            self.steps[computation.name] = [
                step
                for one, label in zip(computation.instructions, labels, strict=True)
                if (step := self._step(computation, one, label))
            ]
        for step in self.steps[computation.name]:
            step()

    def finish(self) -> None:
        """Waits for the collectives that have no `-done`."""
        for name in list(self.under_way):
            self._wait(name)

    def _step(
        self, computation: Computation, one: Instruction, label: str
    ) -> Callable[[], None] | None:
        if one.opcode == "while":
            return lambda: self._loop(one)
        if one.opcode in ("call", "conditional"):
            return lambda: self._branch(one)
        if one.opcode.endswith("-done"):
            started = one.operands[0]
            return lambda: self._wait(started)
        if collective := collective_of(self.module, computation, one):
            seconds = wire_seconds(collective, self.num_devices, self.cost)
            is_async = one.opcode.endswith("-start")
            return lambda: self._send(collective, one.name, seconds, is_async)
        if one.opcode.endswith(("-start", "-update")):
            return None  # A copy to or from the host, which is on neither stream.
        seconds = compute_seconds(self.module, computation, one, self.cost)
        return (lambda: self._run(label, seconds)) if seconds else None

    def _run(self, label: str, seconds: float) -> None:
        start, self.now = self.now, self.now + seconds
        last = self.compute[-1] if self.compute else None
        if last and last.name == label and last.end == start:
            self.compute[-1] = Span(last.start, self.now, label)
        else:
            self.compute.append(Span(start, self.now, label))

    def _send(self, collective, name: str, seconds: float, is_async: bool) -> None:
        # The stream runs one collective at a time, in the order of their starts.
        start = max(self.now, self.wire_free)
        self.wire_free = start + seconds
        self.sent.append(Sent(collective, start, self.wire_free, 0.0, self.depth))
        self.under_way[name] = len(self.sent) - 1
        if not is_async:
            self._wait(name)

    def _wait(self, name: str) -> None:
        at = self.under_way.pop(name, None)
        if at is None:
            return
        sent = self.sent[at]
        if sent.end > self.now:
            self.sent[at] = dataclasses.replace(sent, exposed=sent.end - self.now)
            self.now = sent.end

    def _loop(self, one: Instruction) -> None:
        self.depth += 1
        around = self.iteration
        for self.iteration in range(one.trip_count or 1):
            self.play(self.module[one.calls[0]])
        self.iteration = around
        self.depth -= 1

    def _branch(self, one: Instruction) -> None:
        """Runs the longest branch of a call, which is that of the busiest device.

        In pipeline ticks in which no stage has a turn, runs the shortest branch.
        """
        branches = sorted(one.calls, key=self._alone)
        turns = re.search(r"turns_(\d+)_(\d+)/cond$", one.op_name)
        is_idle = turns and not int(turns[1]) <= self.iteration < int(turns[2])
        self.play(self.module[branches[0 if is_idle else -1]])

    def _alone(self, name: str) -> float:
        """Returns the seconds of a computation by itself."""
        if name not in self.alone:
            player = _Player(self.module, self.cost, self.num_devices)
            player.play(self.module[name])
            player.finish()
            self.alone[name] = player.now
        return self.alone[name]


def _labels(computation: Computation, *, in_loop: bool) -> list[str]:
    """Labels instructions as forward, backward or optimizer, from their scopes.

    Recomputation in backward has the scopes of forward, so a loop with any backward
    instruction is labelled backward as a whole. An instruction without a scope takes
    the label of the one before it.
    """
    labels, label = [], "forward"
    for one in computation.instructions:
        if "optimizer" in one.op_name:
            label = "optimizer"
        elif one.op_name:
            label = "backward" if "transpose(" in one.op_name else "forward"
        labels.append(label)
    if in_loop and "backward" in labels:
        return ["backward"] * len(labels)
    return labels
