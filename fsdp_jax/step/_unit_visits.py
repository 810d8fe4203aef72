"""Visits of units in the trace of a loss: one run each, in forward or in backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fsdp_jax._scopes import (
    ALL_REDUCE,
    REDUCE_DEFERRED,
    REDUCE_SCATTER,
    is_in,
    unit_of,
)
from fsdp_jax.step._flat_trace import CALLS, is_collective, is_var

_REDUCTIONS = (REDUCE_SCATTER, ALL_REDUCE, REDUCE_DEFERRED)


@dataclasses.dataclass
class Visit:
    """One run of a unit: in forward, or in backward.

    Attributes:
      unit: Name of the unit.
      index: Number of visits before this one.
      gathers: Equations that gather its weights.
      start: Variables that are there when the unit begins to compute.
      first: Equation that begins to compute.
      reach: Index of the last visit that `start` depends on; -1 for none.
      end: Variables that are there when the unit has computed.
      readers: Equations that compute with its weights.
    """

    unit: str
    index: int
    gathers: list[Any] = dataclasses.field(default_factory=list)
    start: tuple[Any, ...] = ()
    first: Any = None
    reach: int = -2
    end: tuple[Any, ...] = ()
    readers: list[Any] = dataclasses.field(default_factory=list)

    @property
    def is_next(self) -> bool:
        """Whether the unit begins with what the visit before it has computed."""
        return self.reach == self.index - 1


def unit_in(eqn: Any) -> str | None:
    """Returns the unit in whose scope an equation is, or the root; None for none."""
    return unit_of(eqn.source_info.name_stack)


def visits_of(eqns: Sequence[Any], of_shards: set[Any]) -> list[Visit]:
    """Returns the visits of units, in the order of the program."""
    walk = _Walk(of_shards)
    for eqn in eqns:
        walk.add(eqn)
    for before, visit, inner in zip(
        [None, *walk.visits], walk.visits, walk.visits[1:], strict=False
    ):
        # A unit that enters another one first begins with it, and its weights are
        # gathered once the visit before has computed.
        if not visit.start and inner.unit.startswith(f"{visit.unit}."):
            visit.start = (before.end if before else ()) or inner.start
            visit.reach = visit.index - 1
    return [visit for visit in walk.visits if visit.start]


# A unit begins with the operand that depends on most of the visits before it. This need
# not be the first that it reads: the blocks of a diffusion transformer first multiply
# their weights with the time step's embedding, which is there from the beginning.
class _Walk:
    """Finds the visits of units; each is looked at until the next one gathers.

    Attributes:
      visits: Visits in the order of the program.
    """

    def __init__(self, of_shards: set[Any]) -> None:
        self.visits: list[Visit] = []
        self._of_shards = of_shards
        # Variable that depends on weights alone -> the visits that gathered some.
        self._weights: dict[Any, frozenset[int]] = {}
        # Any other variable -> the last visit that it depends on.
        self._reach: dict[Any, int] = {}
        self._reduced: set[Any] = set()

    def add(self, eqn: Any) -> None:
        read = [v for v in eqn.invars if is_var(v)]
        if (unit := unit_in(eqn)) and is_gather(eqn, self._of_shards):
            self._gather(unit, eqn)
        elif eqn.primitive.name == "optimization_barrier":
            self._barrier(eqn, read)
        elif all(v in self._of_shards for v in read):
            if of_visits := self._gathered(read):
                self._weights.update(dict.fromkeys(eqn.outvars, of_visits))
        else:
            self._compute(eqn, unit, read)

    def _gather(self, unit: str, eqn: Any) -> None:
        last = self.visits[-1] if self.visits else None
        if last is None or last.first is not None or last.unit != unit:
            last = Visit(unit, len(self.visits))
            self.visits.append(last)
        last.gathers.append(eqn)
        self._weights.update(dict.fromkeys(eqn.outvars, frozenset([last.index])))

    def _barrier(self, eqn: Any, read: Sequence[Any]) -> None:
        reach = max((self._reach.get(v, -1) for v in read), default=-1)
        for v, out in zip(eqn.invars, eqn.outvars, strict=True):
            if is_var(v) and v in self._of_shards:
                self._weights[out] = self._gathered([v])
            else:
                self._reach[out] = reach

    def _gathered(self, read: Sequence[Any]) -> frozenset[int]:
        return frozenset().union(*(self._weights.get(v, ()) for v in read))

    def _compute(self, eqn: Any, unit: str | None, read: Sequence[Any]) -> None:
        given = {v: self._reach.get(v, -1) for v in read if v not in self._of_shards}
        of_visits = self._gathered(read)
        for at in of_visits:
            self.visits[at].readers.append(eqn)
        gathered = max(of_visits, default=-1)
        reach = max(gathered, *given.values())
        self._reach.update(dict.fromkeys(eqn.outvars, reach))
        if is_reduction(eqn) or not self._reduced.isdisjoint(read):
            self._reduced.update(eqn.outvars)
        elif eqn.primitive.name in ("scan", *CALLS) and len(of_visits) > 1:
            # It runs all these units, as a loop over time runs the cells of layers.
            for visit in (self.visits[at] for at in of_visits):
                _note_start(visit, eqn, given)
                visit.end = _activations(eqn.outvars) or visit.end
        elif self.visits and reach == self.visits[-1].index:
            visit = self.visits[-1]
            if gathered == reach or unit == visit.unit:
                _note_start(visit, eqn, given)
            if unit == visit.unit:
                visit.end = _activations(eqn.outvars) or visit.end


def _note_start(visit: Visit, eqn: Any, given: Mapping[Any, int]) -> None:
    """Lets a visit begin with an operand of `eqn` that depends on more visits."""
    reach = max((at for at in given.values() if at < visit.index), default=-2)
    start = _activations(v for v, at in given.items() if at == reach)
    if start and reach > visit.reach:
        visit.start, visit.first, visit.reach = start, eqn, reach


def is_gather(eqn: Any, of_shards: set[Any]) -> bool:
    """Returns whether an equation gathers shards."""
    return is_collective(eqn) and all(v in of_shards for v in eqn.invars if is_var(v))


def _activations(variables: Iterable[Any]) -> tuple[Any, ...]:
    """Returns the largest of some arrays, at most one; keys are not looked at."""
    found = [
        v for v in variables if not jnp.issubdtype(v.aval.dtype, jax.dtypes.extended)
    ]
    return (max(found, key=lambda v: v.aval.size),) if found else ()


def is_reduction(eqn: Any) -> bool:
    """Returns whether an equation reduces gradients of a unit."""
    scopes = eqn.source_info.name_stack
    return (
        is_collective(eqn)
        and unit_in(eqn) is not None
        and any(is_in(scopes, name) for name in _REDUCTIONS)
    )
