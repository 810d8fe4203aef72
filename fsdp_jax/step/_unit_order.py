"""Orders the collectives of units that a model runs one after the other.

XLA sees a program in which every shard is ready from the start. It gathers the weights
of all units of an unrolled model at once, merges these gathers, and reduces the
gradients of all units together at the end. So the whole model is unsharded, and nothing
is left to overlap with. `order_units` adds the missing dependencies to the trace of a
loss's gradients, with optimization barriers, which change no value:

| collective of the j-th unit | waits for | so that |
|---|---|---|
| gather | the inputs of unit j - prefetch | at most prefetch + 1 are unsharded |
| gather | the gather of unit j - 1 | XLA does not merge the two |
| reduction | the reduction of unit j - 1 | XLA does not merge the two |

If the inputs of unit j - prefetch do not depend on the unit before it, a gather waits
for the results of that unit too. The j-th unit itself waits for the reduction of unit j
- 2, so that the unreduced gradients of at most two units are in memory: those being
reduced and those being made. A gather casts what it reads behind its barrier, or XLA
would cast the shards of the whole model first and keep them.

Units are counted in the order of the trace, forward and then backward. A visit of a
unit whose weights are still there, as at the turn from forward to backward, does not
gather them again.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from fsdp_jax._scopes import (
    ALL_REDUCE,
    REDUCE_DEFERRED,
    REDUCE_SCATTER,
    is_in,
    unit_of,
)
from fsdp_jax.step._flat_trace import (
    FlatTrace,
    barrier_of,
    is_collective,
    operand,
)
from fsdp_jax.step._lifted_gathers import without_dead

_REDUCTIONS = (REDUCE_SCATTER, ALL_REDUCE, REDUCE_DEFERRED)


@dataclasses.dataclass
class _Visit:
    """One run of a unit: in forward, or in backward.

    Attributes:
      unit: Name of the unit.
      index: Number of visits before this one.
      gathers: Equations that gather its weights.
      start: Variables that are there when the unit begins to compute.
      first: Equation that begins to compute.
      reach: Index of the last visit that `start` depends on; -1 for none.
      end: Variables that are there when the unit has computed.
    """

    unit: str
    index: int
    gathers: list[Any] = dataclasses.field(default_factory=list)
    start: tuple[Any, ...] = ()
    first: Any = None
    reach: int = -2
    end: tuple[Any, ...] = ()

    @property
    def is_next(self) -> bool:
        """Whether the unit begins with what the visit before it has computed."""
        return self.reach == self.index - 1


def order_units(closed: Any, num_shard_leaves: int, prefetch: int) -> Any:
    """Orders the collectives of unrolled units in the trace of a loss or its gradients.

    Args:
      closed: `ClosedJaxpr`; its first inputs are the leaves of the shards.
      num_shard_leaves: Number of these inputs.
      prefetch: Number of units whose weights are gathered ahead; at least 1.

    Returns:
      A `ClosedJaxpr` with the same inputs and outputs, and the same values to the bit.
      `closed` itself if it runs fewer than two units outside of loops.
    """
    flat = FlatTrace(closed, set(closed.jaxpr.invars[:num_shard_leaves]))
    eqns = without_dead(flat.eqns, flat.outvars)
    visits = _visits(eqns, flat.of_shards)
    if len(visits) < 2:
        return closed
    eqns = _without_repeated(eqns, visits, prefetch, flat.of_shards)
    eqns, casts = _with_casts_last(eqns, visits)
    waits, env = _waits_of_gathers(visits, prefetch, casts), {}
    eqns = list(_ordered(eqns, visits, waits, env))
    outvars = [operand(env, v) for v in flat.outvars]
    eqns = without_dead(eqns, outvars)
    jaxpr = closed.jaxpr.replace(
        constvars=list(flat.consts),
        eqns=eqns,
        outvars=outvars,
        debug_info=closed.jaxpr.debug_info.with_unknown_names(),
    )
    return core.ClosedJaxpr(jaxpr, list(flat.consts.values()))


def _unit_of(eqn: Any) -> str | None:
    """Returns the unit in whose scope an equation is, or the root; None for none."""
    return unit_of(eqn.source_info.name_stack)


def _visits(eqns: Sequence[Any], of_shards: set[Any]) -> list[_Visit]:
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
        self.visits: list[_Visit] = []
        self._of_shards = of_shards
        # Variable that depends on weights alone -> the last visit that gathered some.
        self._weights: dict[Any, int] = {}
        # Any other variable -> the last visit that it depends on.
        self._reach: dict[Any, int] = {}
        self._reduced: set[Any] = set()

    def add(self, eqn: Any) -> None:
        read = [v for v in eqn.invars if _is_var(v)]
        if (unit := _unit_of(eqn)) and _is_gather(eqn, self._of_shards):
            self._gather(unit, eqn)
        elif eqn.primitive.name == "optimization_barrier":
            self._barrier(eqn, read)
        elif all(v in self._of_shards for v in read):
            if (visit := self._last_gathered(read)) >= 0:
                self._weights.update(dict.fromkeys(eqn.outvars, visit))
        else:
            self._compute(eqn, unit, read)

    def _gather(self, unit: str, eqn: Any) -> None:
        last = self.visits[-1] if self.visits else None
        if last is None or last.first is not None or last.unit != unit:
            last = _Visit(unit, len(self.visits))
            self.visits.append(last)
        last.gathers.append(eqn)
        self._weights.update(dict.fromkeys(eqn.outvars, last.index))

    def _barrier(self, eqn: Any, read: Sequence[Any]) -> None:
        reach = max((self._reach.get(v, -1) for v in read), default=-1)
        for v, out in zip(eqn.invars, eqn.outvars, strict=True):
            if _is_var(v) and v in self._of_shards:
                self._weights[out] = self._weights.get(v, -1)
            else:
                self._reach[out] = reach

    def _last_gathered(self, read: Sequence[Any]) -> int:
        return max((self._weights.get(v, -1) for v in read), default=-1)

    def _compute(self, eqn: Any, unit: str | None, read: Sequence[Any]) -> None:
        given = {v: self._reach.get(v, -1) for v in read if v not in self._of_shards}
        gathered = self._last_gathered(read)
        reach = max(gathered, *given.values())
        self._reach.update(dict.fromkeys(eqn.outvars, reach))
        if _is_reduction(eqn) or not self._reduced.isdisjoint(read):
            self._reduced.update(eqn.outvars)
        elif self.visits and reach == self.visits[-1].index:
            visit = self.visits[-1]
            if gathered == reach or unit == visit.unit:
                _note_start(visit, eqn, given)
            if unit == visit.unit:
                visit.end = _activations(eqn.outvars) or visit.end


def _note_start(visit: _Visit, eqn: Any, given: Mapping[Any, int]) -> None:
    """Lets a visit begin with an operand of `eqn` that depends on more visits."""
    reach = max((at for at in given.values() if at < visit.index), default=-2)
    start = _activations(v for v, at in given.items() if at == reach)
    if start and reach > visit.reach:
        visit.start, visit.first, visit.reach = start, eqn, reach


def _is_gather(eqn: Any, of_shards: set[Any]) -> bool:
    return is_collective(eqn) and all(v in of_shards for v in eqn.invars if _is_var(v))


def _activations(variables: Iterable[Any]) -> tuple[Any, ...]:
    """Returns the largest of some arrays, at most one; keys are not looked at."""
    found = [
        v for v in variables if not jnp.issubdtype(v.aval.dtype, jax.dtypes.extended)
    ]
    return (max(found, key=lambda v: v.aval.size),) if found else ()


def _without_repeated(
    eqns: Sequence[Any], visits: Sequence[_Visit], prefetch: int, of_shards: set[Any]
) -> list[Any]:
    """Lets a visit take the weights that one of the visits just before it gathered.

    So backward begins with the units that forward ended with, and what a checkpointed
    function of the model recomputes is not gathered once more for its derivative.

    Args:
      eqns: Equations.
      visits: Visits; those that need no gather of their own any more lose it.
      prefetch: Number of units that stay unsharded beside the one that computes.
      of_shards: Variables that depend on shards and constants alone.

    Returns:
      The equations, without the gathers that are not needed.
    """
    origin = _origins(eqns, of_shards)
    repeated: dict[Any, Any] = {}
    there: list[dict[Any, Sequence[Any]]] = []
    for i, visit in enumerate(visits):
        # At the turn from forward to backward the visits run ..., 2, 1 | 1, 2, ...,
        # counted from the turn: visit k of backward follows its unit's visit of forward
        # by 2k - 1 visits. So this window keeps the last `prefetch` units of forward,
        # which is what the budget of unsharded units allows.
        before = there[-(2 * prefetch - 1) :]
        is_same = i > 0 and visits[i - 1].unit == visit.unit
        there.append(dict(there[-1]) if is_same else {})
        for eqn in visit.gathers:
            key = _key(eqn, origin)
            made = next((one[key] for one in reversed(before) if key in one), None)
            there[-1][key] = made or eqn.outvars
            repeated.update(zip(eqn.outvars, made or (), strict=False))
        visit.gathers = [e for e in visit.gathers if _name(e) not in repeated]
    return [_with_operands(eqn, repeated) for eqn in eqns if _name(eqn) not in repeated]


def _is_var(v: Any) -> bool:
    return isinstance(v, core.Var)


def _name(eqn: Any) -> Any:
    """Returns a variable that stands for an equation; None if it has no result."""
    return eqn.outvars[0] if eqn.outvars else None


def _with_operands(eqn: Any, moved: dict[Any, Any]) -> Any:
    return eqn.replace(invars=[operand(moved, v) for v in eqn.invars])


def _origins(eqns: Sequence[Any], of_shards: set[Any]) -> dict[Any, Any]:
    """Returns for each variable the equations that make it of shards, less barriers."""
    origin: dict[Any, Any] = {}
    for eqn in eqns:
        if eqn.primitive.name == "optimization_barrier":
            for v, out in zip(eqn.invars, eqn.outvars, strict=True):
                origin[out] = origin.get(v, v) if _is_var(v) else str(v)
        elif all(v in of_shards for v in eqn.outvars):
            for i, out in enumerate(eqn.outvars):
                origin[out] = (i, *_key(eqn, origin))
    return origin


def _key(eqn: Any, origin: dict[Any, Any]) -> tuple[Any, ...]:
    given = (
        str(v) if isinstance(v, core.Literal) else origin.get(v, v) for v in eqn.invars
    )
    return (eqn.primitive.name, str(eqn.params), *given)


def _with_casts_last(
    eqns: Sequence[Any], visits: Sequence[_Visit]
) -> tuple[list[Any], dict[Any, Any]]:
    """Moves the casts of shards to the gathers that read them.

    Args:
      eqns: Equations.
      visits: Visits of units.

    Returns:
      The equations, each such cast just before its gather; and for each of these
      gathers its cast, both by name.
    """
    readers = collections.Counter(v for eqn in eqns for v in eqn.invars if _is_var(v))
    casts = {
        _name(eqn): eqn
        for eqn in eqns
        if eqn.primitive.name == "convert_element_type" and readers[_name(eqn)] == 1
    }
    own = {
        _name(eqn): casts[eqn.invars[0]]
        for visit in visits
        for eqn in visit.gathers
        if len(eqn.invars) == 1 and eqn.invars[0] in casts
    }
    moved = {_name(cast) for cast in own.values()}
    ordered = []
    for eqn in eqns:
        if _name(eqn) in own:
            ordered.append(own[_name(eqn)])
        if _name(eqn) not in moved:
            ordered.append(eqn)
    return ordered, {gather: _name(cast) for gather, cast in own.items()}


def _ordered(
    eqns: Sequence[Any],
    visits: Sequence[_Visit],
    waits: Mapping[Any, tuple[Any, ...]],
    env: dict[Any, Any],
) -> Iterator[Any]:
    """Yields the equations, with barriers before collectives and units.

    Args:
      eqns: Equations.
      visits: Visits of units.
      waits: Variables that a gather, or the cast before it, waits for, by its name.
      env: Filled with what stands for the variables that units begin with.
    """
    begins = {_name(visit.first): visit.start for visit in visits if visit.first}
    unit, groups = None, [[], []]  # Results of reductions, unit by unit.
    for eqn in eqns:
        eqn = _with_operands(eqn, env)
        if start := begins.get(_name(eqn)):
            yield from _after(eqn, start, groups[-2], env)
            eqn = _with_operands(eqn, env)
        own: dict[Any, Any] = {}
        if after := waits.get(_name(eqn)):
            yield from _after(eqn, eqn.invars, after, own)
        elif _is_reduction(eqn):
            if _unit_of(eqn) != unit:
                unit, groups = _unit_of(eqn), [*groups, []]
            yield from _after(eqn, eqn.invars, groups[-2], own)
            groups[-1].extend(eqn.outvars)
        yield _with_operands(eqn, own)


def _after(
    eqn: Any, variables: Iterable[Any], after: Iterable[Any], env: dict[Any, Any]
) -> Iterator[Any]:
    """Yields a barrier behind which `variables` are there once all of `after` are.

    Args:
      eqn: Equation that reads what the barrier returns.
      variables: Operands; literals are left out.
      after: Variables to wait for. Without any there is no barrier.
      env: Filled with what stands for `variables` from here on.
    """
    names = [v for v in dict.fromkeys(variables) if _is_var(v)]
    own = [operand(env, v) for v in names]
    others = [v for v in dict.fromkeys(after) if v not in own]
    if own and others:
        barrier = barrier_of([*own, *others], eqn.source_info)
        env.update(zip(names, barrier.outvars, strict=False))
        yield barrier


def _waits_of_gathers(
    visits: Sequence[_Visit], prefetch: int, casts: Mapping[Any, Any]
) -> dict[Any, tuple[Any, ...]]:
    """Returns what each gather of units waits for, by the name of its cast or its own.

    Args:
      visits: Visits of units.
      prefetch: Number of units gathered ahead.
      casts: Name of the cast before a gather, by the gather's name.
    """
    waits: dict[Any, tuple[Any, ...]] = {}
    for i, visit in enumerate(visits):
        start = _started(visits, i - prefetch) if i >= prefetch else ()
        before = visits[i - 1].gathers if i else ()
        gathered = tuple(v for eqn in before for v in eqn.outvars)
        for eqn in visit.gathers:
            waits[casts.get(_name(eqn), _name(eqn))] = start + gathered
    return waits


def _started(visits: Sequence[_Visit], i: int) -> tuple[Any, ...]:
    """Returns variables that are there once unit `i`, and none before, computes."""
    # A unit that does not follow on the one before, such as the first one of a second
    # encoder, could begin while that one still computes.
    before = visits[i - 1].end if i and not visits[i].is_next else ()
    return visits[i].start + before


def _is_reduction(eqn: Any) -> bool:
    """Returns whether an equation reduces gradients of a unit."""
    scopes = eqn.source_info.name_stack
    return (
        is_collective(eqn)
        and _unit_of(eqn) is not None
        and any(is_in(scopes, name) for name in _REDUCTIONS)
    )
