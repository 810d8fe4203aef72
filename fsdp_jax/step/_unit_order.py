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
| reduction | the reduction of unit j - 1 | it overlaps with the backward of unit j + 1 |

Units are counted in the order of the trace, forward and then backward. Where backward
begins with the units that forward ended with, it takes their weights from forward.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from fsdp_jax.sharding._plan import ROOT
from fsdp_jax.step._shard_usage import GATHERS

_REMAT = ("checkpoint", "remat", "remat2")
_CALLS = (*_REMAT, "jit", "pjit", "closed_call")
_COLLECTIVES = ("all_gather", "reduce_scatter", "all_to_all", "psum", "pmax")
_REDUCTION = re.compile(r"reduce_scatter|all_reduce|reduce_deferred")


@dataclasses.dataclass
class _Visit:
    """One run of a unit: in forward, or in backward.

    Attributes:
      unit: Name of the unit.
      gathers: Equations that gather its weights.
      start: Variables that are there when the unit begins to compute.
    """

    unit: str
    gathers: list[Any] = dataclasses.field(default_factory=list)
    start: tuple[Any, ...] = ()


def order_units(closed: Any, num_shard_leaves: int, prefetch: int) -> Any:
    """Orders the collectives of unrolled units in a trace of gradients.

    Args:
      closed: `ClosedJaxpr` of the gradients of a loss; its first inputs are the leaves
        of the shards.
      num_shard_leaves: Number of these inputs.
      prefetch: Number of units whose weights are gathered ahead; at least 1.

    Returns:
      A `ClosedJaxpr` with the same inputs and outputs, and the same values to the bit.
      `closed` itself if it runs fewer than two units outside of loops.
    """
    flat = _Flat(closed, set(closed.jaxpr.invars[:num_shard_leaves]))
    eqns = _without_dead(flat.eqns, flat.outvars)
    visits = _visits(eqns, flat.of_shards)
    if len(visits) < 2:
        return closed
    eqns = _reuse_at_the_turn(eqns, visits, prefetch, flat)
    eqns = _without_dead(list(_ordered(eqns, visits, prefetch)), flat.outvars)
    jaxpr = closed.jaxpr.replace(
        constvars=list(flat.consts),
        eqns=eqns,
        outvars=flat.outvars,
        debug_info=closed.jaxpr.debug_info.with_unknown_names(),
    )
    return core.ClosedJaxpr(jaxpr, list(flat.consts.values()))


class _Flat:
    """A jaxpr with the calls inlined in which units gather or reduce.

    Attributes:
      eqns: Equations.
      outvars: Results.
      consts: Values of constants by their variable.
      of_shards: Variables that depend on shards and constants alone.
    """

    def __init__(self, closed: Any, shards: set[Any]) -> None:
        self.eqns: list[Any] = []
        self.consts = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        self.of_shards = set(shards)
        self._env: dict[Any, Any] = {}
        self._walk(closed.jaxpr.eqns, self._env, None)
        self.outvars = [_read(self._env, v) for v in closed.jaxpr.outvars]

    def _walk(self, eqns: Iterable[Any], env: dict[Any, Any], outer: Any) -> None:
        for eqn in eqns:
            given = [_read(env, v) for v in eqn.invars]
            info = eqn.source_info
            if outer is not None:
                stack = outer + info.name_stack
                info = info.replace(name_stack=stack)
            if not _opens(eqn):
                new = [_fresh(v) for v in eqn.outvars]
                env.update(zip(eqn.outvars, new, strict=True))
                self._add(eqn.replace(invars=given, outvars=new, source_info=info))
                continue
            if eqn.primitive.name in _REMAT and eqn.params["prevent_cse"]:
                given = self._apart(given, info)
            inner, consts = _called(eqn)
            own = dict(zip(inner.invars, given, strict=True))
            for v, value in zip(inner.constvars, consts, strict=True):
                own[v] = _fresh(v)
                self.consts[own[v]] = value
            self._walk(inner.eqns, own, info.name_stack)
            results = [_read(own, v) for v in inner.outvars]
            env.update(zip(eqn.outvars, results, strict=True))

    def _apart(self, given: list[Any], info: Any) -> list[Any]:
        """Keeps recomputed values apart from those of forward, as jax does.

        jax puts one barrier around all operands of a checkpointed function. The shards
        get one of their own, or their gather would wait for the other operands.
        """
        variables = dict.fromkeys(v for v in given if isinstance(v, core.Var))
        moved: dict[Any, Any] = {}
        for own in (True, False):
            group = [v for v in variables if (v in self.of_shards) == own]
            if group:
                barrier = _barrier(group, info)
                moved.update(zip(group, barrier.outvars, strict=True))
                self._add(barrier)
        return [moved[v] if isinstance(v, core.Var) else v for v in given]

    def _add(self, eqn: Any) -> None:
        self.eqns.append(eqn)
        read = (v for v in eqn.invars if isinstance(v, core.Var))
        if not _has_effects(eqn) and all(v in self.of_shards or v in self.consts for v in read):
            self.of_shards.update(eqn.outvars)


def _read(env: dict[Any, Any], v: Any) -> Any:
    return v if isinstance(v, core.Literal) else env.get(v, v)


def _fresh(v: Any) -> Any:
    # The body of a call may be inlined several times, each with variables of its own.
    return v if isinstance(v, core.DropVar) else core.Var(v.aval)


def _called(eqn: Any) -> tuple[Any, Sequence[Any]]:
    """Returns the jaxpr that a call runs, and its constants."""
    jaxpr = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    if isinstance(jaxpr, core.ClosedJaxpr):
        return jaxpr.jaxpr, jaxpr.consts
    return jaxpr, ()


def _opens(eqn: Any) -> bool:
    """Returns whether an equation is a call that runs collectives of units."""
    name = eqn.primitive.name
    if name == "custom_vjp_call":
        return eqn.params["call_jaxpr"].jaxpr.debug_info.func_name in GATHERS
    return name in _CALLS and _communicates(_called(eqn)[0])


def _communicates(jaxpr: Any) -> bool:
    """Returns whether a jaxpr runs a collective, outside of loops and branches."""
    return any(
        eqn.primitive.name in _COLLECTIVES
        or eqn.primitive.name == "shard_map"
        and _communicates(_called(eqn)[0])
        or _opens(eqn)
        for eqn in jaxpr.eqns
    )


def _collective_of(eqn: Any) -> bool:
    name = eqn.primitive.name
    return name in _COLLECTIVES or (
        name == "shard_map" and _communicates(_called(eqn)[0])
    )


def _has_effects(eqn: Any) -> bool:
    # A collective has the effect of naming its mesh axes, which is none at run time.
    return any(type(e).__name__ != "NamedAxisEffect" for e in eqn.effects)


def _unit_of(eqn: Any) -> str | None:
    """Returns the unit in whose scope an equation is; None for none and the root."""
    found = re.findall(r"unit:([^/():]+)", str(eqn.source_info.name_stack))
    return found[-1] if found and found[-1] != ROOT else None


def _without_dead(eqns: Sequence[Any], outvars: Sequence[Any]) -> list[Any]:
    """Drops equations whose results nobody reads."""
    live = {v for v in outvars if isinstance(v, core.Var)}
    kept = []
    for eqn in reversed(eqns):
        if _has_effects(eqn) or not live.isdisjoint(eqn.outvars):
            kept.append(eqn)
            live.update(v for v in eqn.invars if isinstance(v, core.Var))
    return kept[::-1]


def _visits(eqns: Sequence[Any], of_shards: set[Any]) -> list[_Visit]:
    """Returns the visits of units, in the order of the program."""
    visits: list[_Visit] = []
    weights: set[Any] = set()
    begun = True
    for eqn in eqns:
        unit = _unit_of(eqn)
        read = {v for v in eqn.invars if isinstance(v, core.Var)}
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
    return [visit for visit in visits if visit.start]


def _is_gather(eqn: Any, of_shards: set[Any]) -> bool:
    return _collective_of(eqn) and all(
        v in of_shards for v in eqn.invars if isinstance(v, core.Var)
    )


def _activations(variables: Iterable[Any]) -> tuple[Any, ...]:
    found = (v for v in variables if jnp.issubdtype(v.aval.dtype, jnp.inexact))
    return tuple(sorted(found, key=lambda v: -v.aval.size)[:1])


def _reuse_at_the_turn(
    eqns: Sequence[Any], visits: list[_Visit], prefetch: int, flat: _Flat
) -> list[Any]:
    """Lets backward begin with the weights that forward ended with.

    Args:
      eqns: Equations.
      visits: Visits; those of backward that need no gather any more are taken out.
      prefetch: Number of units that stay unsharded.
      flat: The jaxpr, for the origin of shards.

    Returns:
      The equations, without the gathers that are not needed.
    """
    turn = next(
        (i for i in range(1, len(visits)) if visits[i].unit == visits[i - 1].unit), None
    )
    if turn is None:
        return list(eqns)
    origin = _origins(eqns, flat.of_shards)
    reused: dict[Any, Any] = {}
    for before, after in list(zip(visits[turn - 1 :: -1], visits[turn:]))[:prefetch]:
        if before.unit != after.unit:
            break
        made = {_key(eqn, origin): eqn for eqn in before.gathers}
        for eqn in after.gathers:
            if (same := made.get(_key(eqn, origin))) is not None:
                reused.update(zip(eqn.outvars, same.outvars, strict=True))
        after.gathers = [e for e in after.gathers if e.outvars[0] not in reused]
    return [
        _with_operands(eqn, reused) for eqn in eqns if eqn.outvars[0] not in reused
    ]


def _with_operands(eqn: Any, moved: dict[Any, Any]) -> Any:
    return eqn.replace(invars=[_read(moved, v) for v in eqn.invars])


def _origins(eqns: Sequence[Any], of_shards: set[Any]) -> dict[Any, Any]:
    """Returns by variable what it is: its equations down to shards, without barriers."""
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


def _ordered(
    eqns: Sequence[Any], visits: Sequence[_Visit], prefetch: int
) -> Iterator[Any]:
    """Yields the equations, with barriers before the collectives of units."""
    waits: dict[Any, tuple[Any, ...]] = {}
    for i, visit in enumerate(visits):
        start = visits[i - prefetch].start if i >= prefetch else ()
        before = visits[i - 1].gathers if i else ()
        gathered = tuple(v for eqn in before for v in eqn.outvars)
        waits.update({eqn.outvars[0]: start + gathered for eqn in visit.gathers})
    unit, reduced, previous = None, [], []
    for eqn in eqns:
        after = waits.get(eqn.outvars[0], ()) if eqn.outvars else ()
        if not after and _is_reduction(eqn):
            if _unit_of(eqn) != unit:
                unit, previous, reduced = _unit_of(eqn), reduced, []
            after = tuple(previous)
            reduced.extend(eqn.outvars)
        if not after:
            yield eqn
            continue
        own = [v for v in dict.fromkeys(eqn.invars) if isinstance(v, core.Var)]
        others = [v for v in dict.fromkeys(after) if v not in own]
        barrier = _barrier([*own, *others], eqn.source_info)
        yield barrier
        yield _with_operands(eqn, dict(zip(own, barrier.outvars, strict=False)))


def _is_reduction(eqn: Any) -> bool:
    """Returns whether an equation reduces gradients of a unit."""
    scope = str(eqn.source_info.name_stack)
    return (
        _collective_of(eqn)
        and _unit_of(eqn) is not None
        and _REDUCTION.search(scope) is not None
    )


def _barrier(variables: Sequence[Any], info: Any) -> Any:
    """Makes an equation whose results are `variables` once all of them are there."""
    return core.new_jaxpr_eqn(
        list(variables),
        [core.Var(v.aval) for v in variables],
        _barrier_primitive(),
        {},
        core.no_effects,
        info,
    )


@functools.cache
def _barrier_primitive() -> Any:
    # Found by a trace, since jax does not publish it.
    (eqn,) = jax.make_jaxpr(lax.optimization_barrier)(1.0).jaxpr.eqns
    return eqn.primitive
