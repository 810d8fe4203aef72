"""A compiled schedule as data: kernels, collectives, waits, loops and branches.

It has no speed of any GPU, so that one compilation can be replayed on many cost models,
and it is small enough to be kept in a file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from fsdp_jax._scopes import OPTIMIZER, is_in, is_transposed, turns_of, unit_of
from fsdp_jax.hlo._collectives import Collective, collective_of
from fsdp_jax.hlo._parse import Computation, Instruction, Module
from fsdp_jax.planner._kernel import Kernel, kernel_of


@dataclasses.dataclass(frozen=True)
class Run:
    """A kernel of the compute stream.

    Attributes:
      kernel: Kernel.
      label: "forward", "backward" or "optimizer".
      unit: Unit in whose scope it runs; "" for none.
    """

    kernel: Kernel
    label: str
    unit: str = ""


@dataclasses.dataclass(frozen=True)
class Start:
    """A collective; the compute stream goes on if it is asynchronous.

    Attributes:
      collective: Collective.
      is_async: Whether the compute stream goes on.
      in_backward: Whether it runs among the instructions of backward, which compute
        parts of forward again.
    """

    collective: Collective
    is_async: bool
    in_backward: bool = False


@dataclasses.dataclass(frozen=True)
class Wait:
    """The compute stream waits for the collective of that name."""

    name: str


@dataclasses.dataclass(frozen=True)
class Loop:
    """A body that is run `times` times."""

    times: int
    body: tuple[Step, ...]


@dataclasses.dataclass(frozen=True)
class Branch:
    """Alternatives, of which the longest is run, or the shortest outside of `turns`.

    Attributes:
      choices: Steps of each alternative.
      turns: First and last-but-one iteration in which a pipeline stage has a turn; None
        if it always has.
    """

    choices: tuple[tuple[Step, ...], ...]
    turns: tuple[int, int] | None


Step = Run | Start | Wait | Loop | Branch
CompiledSchedule = tuple[Step, ...]


def schedule_of(module: Module) -> CompiledSchedule:
    """Returns the schedule of a compiled module (`is_scheduled=true`)."""
    return _Reader(module).steps(module[module.entry], in_loop=False)


def kernels_of(schedule: CompiledSchedule) -> Iterator[Kernel]:
    """Yields every kernel of a schedule once, whatever the loops."""
    for step in schedule:
        if isinstance(step, Run):
            yield step.kernel
        elif isinstance(step, Loop):
            yield from kernels_of(step.body)
        elif isinstance(step, Branch):
            for choice in step.choices:
                yield from kernels_of(choice)


class _Reader:
    """Reads computations of a module, each once: a loop may be entered many times."""

    def __init__(self, module: Module):
        self.module = module
        self.known: dict[tuple[str, bool], CompiledSchedule] = {}

    def steps(self, computation: Computation, *, in_loop: bool) -> CompiledSchedule:
        key = computation.name, in_loop
        if key not in self.known:
            labels = _labels(computation, in_loop=in_loop)
            units = _units(computation)
            scopes = zip(labels, units, strict=True)
            self.known[key] = tuple(
                step
                for one, scope in zip(computation.instructions, scopes, strict=True)
                if (step := self._step(computation, one, scope, in_loop=in_loop))
            )
        return self.known[key]

    def _step(
        self,
        computation: Computation,
        one: Instruction,
        scope: tuple[str, str],
        *,
        in_loop: bool,
    ) -> Step | None:
        # A fusion that XLA runs beside others: they share the GPU's memory bandwidth.
        one = computation.fused(one)
        if one.opcode == "while":
            body = self.steps(self.module[one.calls[0]], in_loop=True)
            return Loop(one.trip_count or 1, body)
        if one.opcode in ("call", "conditional"):
            return self._branch(one, in_loop=in_loop)
        if one.opcode.endswith("-done"):
            return Wait(one.operands[0])
        if collective := collective_of(self.module, computation, one):
            named = dataclasses.replace(collective, name=one.name)
            is_async = one.opcode.endswith("-start")
            return Start(named, is_async, in_backward=scope[0] == "backward")
        if one.opcode.endswith(("-start", "-update")):
            # A copy to or from the host, which is on neither stream; or a fusion, which
            # counts where it is done.
            return None
        kernel = kernel_of(self.module, computation, one)
        return Run(kernel, *scope) if kernel else None

    def _branch(self, one: Instruction, *, in_loop: bool) -> Branch:
        choices = (self.steps(self.module[name], in_loop=in_loop) for name in one.calls)
        return Branch(tuple(choices), turns_of(one.op_name))


def _labels(computation: Computation, *, in_loop: bool) -> list[str]:
    """Labels instructions as forward, backward or optimizer, from their scopes.

    Recomputation in backward has the scopes of forward, so a loop with any backward
    instruction is labelled backward as a whole. An instruction without a scope takes
    the label of the one before it.
    """
    labels, label = [], "forward"
    for one in computation.instructions:
        if is_in(one.op_name, OPTIMIZER):
            label = OPTIMIZER
        elif one.op_name:
            label = "backward" if is_transposed(one.op_name) else "forward"
        labels.append(label)
    if in_loop and "backward" in labels:
        return ["backward"] * len(labels)
    return labels


def _units(computation: Computation) -> list[str]:
    """Returns the unit of each instruction; "" for none.

    An instruction without a scope has the unit of the one before it.
    """
    units, unit = [], ""
    for one in computation.instructions:
        if one.op_name:
            unit = unit_of(one.op_name) or ""
        units.append(unit)
    return units
