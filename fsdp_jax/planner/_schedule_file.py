"""Keeps schedules in files: small, the same bytes for the same schedule."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from fsdp_jax.hlo._collectives import Collective
from fsdp_jax.hlo._parse import Shape
from fsdp_jax.planner._kernel import Kernel
from fsdp_jax.planner._schedule import (
    Branch,
    CompiledSchedule,
    Loop,
    Run,
    Start,
    Step,
    Wait,
)


def save_schedule(schedule: CompiledSchedule, path: str | Path) -> None:
    """Writes a schedule as compressed JSON; of replica groups, the widest one.

    Args:
      schedule: Schedule from `schedule_of`.
      path: Output file, by convention `.json.gz`.
    """
    text = json.dumps([_of_step(step) for step in schedule], separators=(",", ":"))
    # Without the time in its header, equal schedules are equal files.
    Path(path).write_bytes(gzip.compress(text.encode(), mtime=0))


def load_schedule(path: str | Path) -> CompiledSchedule:
    """Reads a schedule that `save_schedule` wrote."""
    found = json.loads(gzip.decompress(Path(path).read_bytes()))
    return tuple(_step(item) for item in found)


def _of_step(step: Step) -> list[Any]:
    match step:
        case Run(kernel, label, unit):
            figures = (kernel.flops, kernel.bytes, kernel.length, kernel.width)
            scope = [unit] if unit else []
            return ["run", label, kernel.kind, kernel.dtype, *figures, *scope]
        case Start(collective, is_async, in_backward):
            scope = [in_backward] if in_backward else []
            return ["start", is_async, *_of_collective(collective), *scope]
        case Wait(name):
            return ["wait", name]
        case Loop(times, body):
            return ["loop", times, [_of_step(inner) for inner in body]]
        case Branch(choices, turns):
            listed = [[_of_step(inner) for inner in choice] for choice in choices]
            return ["branch", turns, listed]


def _of_collective(found: Collective) -> list[Any]:
    sides = [
        [[shape.dtype, *shape.dims] for shape in side]
        for side in (found.sent, found.received)
    ]
    group = max(found.groups, key=lambda group: (len(group), group), default=())
    return [found.op, found.name, found.op_name, *sides, _ranges(group)]


def _ranges(group: tuple[int, ...]) -> list[list[int]]:
    """Writes ascending numbers as `[first, step, count]` of runs with equal steps."""
    runs: list[list[int]] = []
    for number in group:
        last = runs[-1] if runs else None
        if last and last[2] == 1:
            last[1:] = [number - last[0], 2]
        elif last and number == last[0] + last[1] * last[2]:
            last[2] += 1
        else:
            runs.append([number, 0, 1])
    return runs


def _step(item: list[Any]) -> Step:
    match item:
        case ["run", label, kind, dtype, flops, moved, length, width, *unit]:
            return Run(Kernel(kind, flops, dtype, moved, length, width), label, *unit)
        case ["start", is_async, op, name, op_name, sent, received, ranges, *scope]:
            group = tuple(
                first + step * at
                for first, step, count in ranges
                for at in range(count)
            )
            groups = frozenset({group} if group else ())
            sides = _shapes(sent), _shapes(received)
            collective = Collective(op, *sides, groups, op_name, name)
            return Start(collective, is_async, *scope)
        case ["wait", name]:
            return Wait(name)
        case ["loop", times, body]:
            return Loop(times, tuple(_step(inner) for inner in body))
        case ["branch", turns, choices]:
            listed = tuple(tuple(_step(i) for i in choice) for choice in choices)
            return Branch(listed, tuple(turns) if turns else None)
    raise ValueError(f"'{item[0]}' is not a kind of step: this file has no schedule.")


def _shapes(listed: list[list[Any]]) -> tuple[Shape, ...]:
    return tuple(Shape(dtype, tuple(dims)) for dtype, *dims in listed)
