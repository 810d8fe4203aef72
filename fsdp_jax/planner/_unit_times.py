"""Seconds of a step by unit: computation, and each kind of collective."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from fsdp_jax.planner._timeline import Timeline

COMPUTE = "compute"
NO_UNIT = "-"
OPTIMIZER = "optimizer"


@dataclasses.dataclass(frozen=True)
class UnitTime:
    """Seconds that a unit takes in a step, of one kind of work.

    Attributes:
      unit: Path of the unit; "optimizer" for the update, "-" for what is in no unit.
      work: "compute", or the opcode of collectives, e.g. "all-gather".
      times: Collectives in a step; 0 for computation, of any number of kernels.
      seconds: Seconds in a step.
      exposed_seconds: Seconds of these in which nothing is computed.
    """

    unit: str
    work: str
    times: float
    seconds: float
    exposed_seconds: float


def unit_times(timeline: Timeline) -> tuple[UnitTime, ...]:
    """Returns the times of a replayed step by unit and kind of work.

    The unit of a collective is that of its scope, as in a profile. XLA keeps one scope
    where it merges collectives of several units.

    Args:
      timeline: Replayed step.
    """
    computed = (
        UnitTime(_place(span.name, span.unit), COMPUTE, 0, span.end - span.start, 0.0)
        for span in timeline.compute
    )
    sent = (
        UnitTime(
            one.collective.unit or NO_UNIT,
            one.collective.op,
            1,
            one.end - one.start,
            one.exposed,
        )
        for one in timeline.sent
    )
    return (*summed(computed), *summed(sent))


def summed(times: Iterable[UnitTime]) -> tuple[UnitTime, ...]:
    """Returns one entry for each unit and kind of work, in the order of the first."""
    found: dict[tuple[str, str], UnitTime] = {}
    for one in times:
        key = one.unit, one.work
        found[key] = _plus(found[key], one) if key in found else one
    return tuple(found.values())


def unit_times_of(values: Iterable[dict[str, Any]]) -> tuple[UnitTime, ...]:
    """Returns the times that `dataclasses.asdict` made values of."""
    return tuple(UnitTime(**one) for one in values)


def _plus(a: UnitTime, b: UnitTime) -> UnitTime:
    return dataclasses.replace(
        a,
        times=a.times + b.times,
        seconds=a.seconds + b.seconds,
        exposed_seconds=a.exposed_seconds + b.exposed_seconds,
    )


def _place(label: str, unit: str) -> str:
    return OPTIMIZER if label == OPTIMIZER else unit or NO_UNIT
