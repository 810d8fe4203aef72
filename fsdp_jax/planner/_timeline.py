"""Replays a compiled schedule on a compute stream and the links between devices."""

from __future__ import annotations

import dataclasses

from fsdp_jax.hlo._collectives import Collective
from fsdp_jax.planner._gpu import CostModel
from fsdp_jax.planner._interconnect import communication_seconds, layout_of, links_used
from fsdp_jax.planner._kernel import Kernel, kernel_seconds
from fsdp_jax.planner._schedule import (
    Branch,
    CompiledSchedule,
    Loop,
    Run,
    Start,
    Step,
    Wait,
)


@dataclasses.dataclass(frozen=True)
class Span:
    """Work of a stream from `start` to `end`, in seconds since the step began.

    Attributes:
      start: Second at which it began.
      end: Second at which it ended.
      name: "forward", "backward" or "optimizer".
      unit: Unit of the kernels; "" for none.
    """

    start: float
    end: float
    name: str
    unit: str = ""


@dataclasses.dataclass(frozen=True)
class Sent:
    """One run of a collective.

    Attributes:
      collective: Collective that ran.
      start: Second at which the communication stream began it.
      end: Second at which it completed.
      exposed: Seconds that the compute stream waited for it.
      depth: Number of enclosing loops.
      in_backward: Whether it ran among the instructions of backward.
    """

    collective: Collective
    start: float
    end: float
    exposed: float
    depth: int
    in_backward: bool = False


@dataclasses.dataclass(frozen=True)
class Timeline:
    """One step of one device.

    Attributes:
      seconds: Duration of the step, from the first instruction to the last.
      compute: Spans of the compute stream in order; adjacent spans of a name and a
        unit are joined.
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
    def communication_seconds(self) -> float:
        """Seconds that the communication stream was busy."""
        return sum(sent.end - sent.start for sent in self.sent)

    @property
    def exposed_seconds(self) -> float:
        """Seconds that the compute stream waited for communication."""
        return sum(sent.exposed for sent in self.sent)


def replay(schedule: CompiledSchedule, cost: CostModel, num_devices: int) -> Timeline:
    """Replays a schedule on a cost model.

    Compute stream and links take their work in the order of the schedule. An
    asynchronous collective begins when the compute stream has reached its start and
    the links that it needs are free; the compute stream waits at its `-done`.
    Synchronous collectives are waited for at once. While a collective runs, kernels
    are slower by `cost.overlap_slowdown`.

    Args:
      schedule: Schedule of a module that was compiled for `num_devices`.
      cost: Speeds of kernels and links.
      num_devices: Number of devices of the mesh.
    """
    player = _Player(cost, num_devices)
    player.play(schedule)
    player.finish()
    return Timeline(player.now, tuple(player.compute), tuple(player.sent))


def floor_seconds(
    schedule: CompiledSchedule, cost: CostModel, num_devices: int
) -> float:
    """Returns the floor of a step: its replay with every collective free.

    Nothing is waited for, and no kernel is slowed down by a collective beside it. What
    a step takes above its floor is what communication costs.

    Args:
      schedule: Schedule of a module that was compiled for `num_devices`.
      cost: Speeds of kernels and links.
      num_devices: Number of devices of the mesh.
    """
    player = _Player(cost, num_devices, free=True)
    player.play(schedule)
    player.finish()
    return player.now


class _Player:
    """Clocks of the compute stream and the links, and the collectives in flight."""

    def __init__(self, cost: CostModel, num_devices: int, *, free: bool = False):
        self.cost = cost
        self.num_devices = num_devices
        # Whether collectives take no time.
        self.is_free = free
        self.now = 0.0
        # Second at which each kind of link is idle.
        self.idle_at = {"nvlink": 0.0, "network": 0.0}
        self.depth = 0
        self.iteration = 0
        self.compute: list[Span] = []
        self.sent: list[Sent] = []
        # Name of a started collective -> its position in `sent`.
        self.under_way: dict[str, int] = {}
        # Loops run the same steps again and again.
        self.kernels: dict[Kernel, float] = {}
        self.collectives: dict[str, tuple[float, tuple[str, ...]]] = {}
        self.alone: dict[int, float] = {}

    def play(self, schedule: CompiledSchedule) -> None:
        for step in schedule:
            self._step(step)

    def finish(self) -> None:
        """Waits for the collectives that have no `-done`."""
        for name in list(self.under_way):
            self._wait(name)

    def _step(self, step: Step) -> None:
        match step:
            case Run():
                self._run(step, self._kernel_seconds(step.kernel))
            case Start():
                self._send(step)
            case Wait():
                self._wait(step.name)
            case Loop():
                self._loop(step)
            case Branch():
                self._branch(step)

    def _kernel_seconds(self, kernel: Kernel) -> float:
        if kernel not in self.kernels:
            self.kernels[kernel] = kernel_seconds(kernel, self.cost)
        return self.kernels[kernel]

    def _run(self, run: Run, seconds: float) -> None:
        if not seconds:
            return
        start = self.now
        # Collectives take multiprocessors and memory bandwidth from kernels.
        pace = 1 - self.cost.overlap_slowdown
        beside = min(seconds / pace, max(max(self.idle_at.values()) - start, 0.0))
        self.now = start + beside + (seconds - beside * pace)
        last = self.compute[-1] if self.compute else None
        scope = run.label, run.unit
        if last and (last.name, last.unit) == scope and last.end == start:
            self.compute[-1] = Span(last.start, self.now, *scope)
        else:
            self.compute.append(Span(start, self.now, *scope))

    def _send(self, step: Start) -> None:
        collective = step.collective
        seconds, links = self._collective_seconds(collective)
        # A link carries one collective at a time, in the order of their starts.
        start = max(self.now, *(self.idle_at[link] for link in links))
        end = start + seconds
        self.idle_at |= dict.fromkeys(links, end)
        sent = Sent(collective, start, end, 0.0, self.depth, step.in_backward)
        self.sent.append(sent)
        self.under_way[collective.name] = len(self.sent) - 1
        if not step.is_async:
            self._wait(collective.name)

    def _collective_seconds(self, found: Collective) -> tuple[float, tuple[str, ...]]:
        if found.name not in self.collectives:
            layout = layout_of(found, self.num_devices, self.cost)
            seconds = 0.0
            if not self.is_free:
                seconds = communication_seconds(found, self.num_devices, self.cost)
            self.collectives[found.name] = seconds, links_used(layout)
        return self.collectives[found.name]

    def _wait(self, name: str) -> None:
        at = self.under_way.pop(name, None)
        if at is None:
            return
        sent = self.sent[at]
        if sent.end > self.now:
            self.sent[at] = dataclasses.replace(sent, exposed=sent.end - self.now)
            self.now = sent.end

    def _loop(self, loop: Loop) -> None:
        self.depth += 1
        around = self.iteration
        for self.iteration in range(loop.times):
            self.play(loop.body)
        self.iteration = around
        self.depth -= 1

    def _branch(self, branch: Branch) -> None:
        """Runs the longest branch of a call, which is that of the busiest device.

        In pipeline ticks in which no stage has a turn, runs the shortest branch.
        """
        choices = sorted(branch.choices, key=self._alone)
        turns = branch.turns
        is_idle = turns and not turns[0] <= self.iteration < turns[1]
        self.play(choices[0 if is_idle else -1])

    def _alone(self, schedule: CompiledSchedule) -> float:
        """Returns the seconds of a branch by itself."""
        if id(schedule) not in self.alone:
            player = _Player(self.cost, self.num_devices, free=self.is_free)
            player.play(schedule)
            player.finish()
            self.alone[id(schedule)] = player.now
        return self.alone[id(schedule)]
