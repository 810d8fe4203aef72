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

The j-th unit itself waits for the reduction of unit j - 2, so that the unreduced
gradients of at most two units are in memory: those being reduced and those being made.
A gather casts what it reads behind its barrier, or XLA would cast the shards of the
whole model first and keep them.

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
      gathers: Equations that gather its weights.
      start: Variables that are there when the unit begins to compute.
      first: Equation that begins to compute.
    """

    unit: str
    gathers: list[Any] = dataclasses.field(default_factory=list)
    start: tuple[Any, ...] = ()
    first: Any = None


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
    visits: list[_Visit] = []
    weights: set[Any] = set()
    begun = True
    for eqn in eqns:
        unit = _unit_of(eqn)
        read = {v for v in eqn.invars if _is_var(v)}
        if unit and _is_gather(eqn, of_shards):
            if begun or not visits or visits[-1].unit != unit:
                visits.append(_Visit(unit))
                weights, begun = set(), False
            visits[-1].gathers.append(eqn)
            weights.update(eqn.outvars)
        elif not read.isdisjoint(weights):
            if read <= of_shards or eqn.primitive.name == "optimization_barrier":
                weights.update(eqn.outvars)
            elif not begun:
                begun = True
                visits[-1].start = _activations(read - of_shards)
                visits[-1].first = eqn
    return [visit for visit in visits if visit.start]


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
                origin[out] = origin.get(v, v)
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
    begins = {_name(visit.first): visit.start for visit in visits}
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
        start = visits[i - prefetch].start if i >= prefetch else ()
        before = visits[i - 1].gathers if i else ()
        gathered = tuple(v for eqn in before for v in eqn.outvars)
        for eqn in visit.gathers:
            waits[casts.get(_name(eqn), _name(eqn))] = start + gathered
    return waits


def _is_reduction(eqn: Any) -> bool:
    """Returns whether an equation reduces gradients of a unit."""
    scopes = eqn.source_info.name_stack
    return (
        is_collective(eqn)
        and _unit_of(eqn) is not None
        and any(is_in(scopes, name) for name in _REDUCTIONS)
    )
