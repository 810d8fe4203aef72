"""Orders the collectives of units that a model runs one after the other.

XLA sees a program in which every shard is ready from the start. It gathers the weights
of all units of an unrolled model at once, merges these gathers, and reduces the
gradients of all units together at the end. So the whole model is unsharded, and nothing
is left to overlap with. `order_units` adds the missing dependencies to the trace of a
loss's gradients, with optimization barriers, which change no value:

| collective of the j-th unit | waits for | so that |
|---|---|---|
| gather | the inputs of unit j - prefetch | at most prefetch + 1 are unsharded |
| gather | the products of unit j - prefetch - 1 | its weights are not needed any more |
| gather | the gather of unit j - 1 | XLA does not merge the two |
| reduction | the reduction of unit j - 1 | XLA does not merge the two |

A gather waits for products on which the inputs of unit j - prefetch do not depend, as
in backward, and for the results of the unit before it if they do not depend on it at
all. What weights give without a product, such as a lookup in a table, is computed once,
since XLA would otherwise keep the table for each reader of the rows. The j-th unit
itself waits for the reduction of unit j - 2, so that the unreduced gradients of at most
two units are in memory: those being reduced and those being made. A gather casts what
it reads behind its barrier, or XLA would cast the shards of the whole model first and
keep them.

The body of a loop that runs the same units in each iteration is ordered by itself. Its
first gathers wait for what differs from iteration to iteration, see `hold_gathers`.

Units are counted in the order of the trace, forward and then backward. A visit of a
unit whose weights are still there, as at the turn from forward to backward, does not
gather them again.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from fsdp_jax.step._flat_trace import (
    CALLS,
    FlatTrace,
    barrier_of,
    called,
    calling,
    is_var,
    name_of,
    operand,
    without_dead,
)
from fsdp_jax.step._held_gathers import has_held
from fsdp_jax.step._loop_equation import Loop
from fsdp_jax.step._unit_visits import (
    Visit,
    is_gather,
    is_reduction,
    unit_in,
    visits_of,
)
from fsdp_jax.step._weight_lifetimes import recomputable, unimplied_reads


def order_units(closed: Any, num_shard_leaves: int, prefetch: int) -> Any:
    """Orders the collectives of unrolled units in the trace of a loss or its gradients.

    Args:
      closed: `ClosedJaxpr`; its first inputs are the leaves of the shards.
      num_shard_leaves: Number of these inputs.
      prefetch: Number of units whose weights are gathered ahead; at least 1.

    Returns:
      A `ClosedJaxpr` with the same inputs and outputs, and the same values to the bit.
    """
    jaxpr = _with_loops_ordered(closed.jaxpr, prefetch)
    closed = core.ClosedJaxpr(jaxpr, closed.consts)
    return _program_ordered(closed, set(jaxpr.invars[:num_shard_leaves]), prefetch)


def _with_loops_ordered(jaxpr: Any, prefetch: int) -> Any:
    """Orders the units in the bodies of loops that `hold_gathers` has marked."""
    eqns = [_with_loop_ordered(eqn, prefetch) for eqn in jaxpr.eqns]
    if all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True)):
        return jaxpr
    return jaxpr.replace(eqns=eqns)


def _with_loop_ordered(eqn: Any, prefetch: int) -> Any:
    is_loop = eqn.primitive.name == "scan"
    if not is_loop and eqn.primitive.name not in CALLS:
        return eqn
    inner, consts = called(eqn)
    new = _with_loops_ordered(inner, prefetch)
    if is_loop and has_held(new):
        constant, *varying = Loop.of(eqn).split(new.invars)
        begin = sorted(itertools.chain(*varying), key=_size)[:1]
        body = core.ClosedJaxpr(new, consts)
        ordered = _program_ordered(body, set(constant), prefetch, tuple(begin))
        new, consts = ordered.jaxpr, ordered.consts
    if new is inner:
        return eqn
    return calling(eqn, new, consts)


def _size(v: Any) -> tuple[bool, int]:
    """Returns a key by which small arrays come first, and PRNG keys last."""
    return jnp.issubdtype(v.aval.dtype, jax.dtypes.extended), v.aval.size


def _program_ordered(
    closed: Any, shards: set[Any], prefetch: int, begin: tuple[Any, ...] = ()
) -> Any:
    """Orders the collectives of a program, or of the body of a loop.

    Args:
      closed: `ClosedJaxpr`.
      shards: Its inputs that are there from the start, and the same in each iteration.
      prefetch: Number of units gathered ahead.
      begin: Of a body, inputs that differ from iteration to iteration: its first units
        wait for them, so that they are gathered in each iteration.
    """
    flat = FlatTrace(closed, shards)
    eqns = without_dead(flat.eqns, flat.outvars)
    visits = visits_of(eqns, flat.of_shards)
    if len(visits) < 2:
        return closed
    done = _last_reads(eqns, visits, prefetch)
    eqns = _without_repeated(eqns, visits, prefetch, flat.of_shards)
    gathers = [eqn for eqn in eqns if is_gather(eqn, flat.of_shards)]
    apart = recomputable(eqns, gathers, flat.of_shards)
    eqns, casts = _with_casts_last(eqns, visits)
    waits, env = _waits_of_gathers(visits, prefetch, casts, done, begin), {}
    eqns = list(_ordered(eqns, visits, _possible(eqns, waits), apart, env))
    outvars = [operand(env, v) for v in flat.outvars]
    eqns = without_dead(eqns, outvars)
    jaxpr = closed.jaxpr.replace(
        constvars=list(flat.consts),
        eqns=eqns,
        outvars=outvars,
        debug_info=closed.jaxpr.debug_info.with_unknown_names(),
    )
    return core.ClosedJaxpr(jaxpr, list(flat.consts.values()))


def _without_repeated(
    eqns: Sequence[Any], visits: Sequence[Visit], prefetch: int, of_shards: set[Any]
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
        # which is what the budget of unsharded units allows: fewer visits if they are
        # of more units, as where forward runs twice.
        begin = max(i - 2 * prefetch + 1, 0)
        while len({one.unit for one in visits[begin:i]}) > prefetch:
            begin += 1
        before = there[begin:]
        is_same = i > 0 and visits[i - 1].unit == visit.unit
        there.append(dict(there[-1]) if is_same else {})
        for eqn in visit.gathers:
            key = _key(eqn, origin)
            made = next((one[key] for one in reversed(before) if key in one), None)
            there[-1][key] = made or eqn.outvars
            repeated.update(zip(eqn.outvars, made or (), strict=False))
        visit.gathers = [e for e in visit.gathers if name_of(e) not in repeated]
    return [
        _with_operands(eqn, repeated) for eqn in eqns if name_of(eqn) not in repeated
    ]


def _with_operands(eqn: Any, moved: dict[Any, Any]) -> Any:
    return eqn.replace(invars=[operand(moved, v) for v in eqn.invars])


def _origins(eqns: Sequence[Any], of_shards: set[Any]) -> dict[Any, Any]:
    """Returns for each variable the equations that make it of shards, less barriers."""
    origin: dict[Any, Any] = {}
    for eqn in eqns:
        if eqn.primitive.name == "optimization_barrier":
            for v, out in zip(eqn.invars, eqn.outvars, strict=True):
                origin[out] = origin.get(v, v) if is_var(v) else str(v)
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
    eqns: Sequence[Any], visits: Sequence[Visit]
) -> tuple[list[Any], dict[Any, Any]]:
    """Moves the casts of shards to the gathers that read them.

    Args:
      eqns: Equations.
      visits: Visits of units.

    Returns:
      The equations, each such cast just before its gather; and for each of these
      gathers its cast, both by name.
    """
    readers = collections.Counter(v for eqn in eqns for v in eqn.invars if is_var(v))
    casts = {
        name_of(eqn): eqn
        for eqn in eqns
        if eqn.primitive.name == "convert_element_type" and readers[name_of(eqn)] == 1
    }
    own = {
        name_of(eqn): casts[eqn.invars[0]]
        for visit in visits
        for eqn in visit.gathers
        if len(eqn.invars) == 1 and eqn.invars[0] in casts
    }
    moved = {name_of(cast) for cast in own.values()}
    ordered = []
    for eqn in eqns:
        if name_of(eqn) in own:
            ordered.append(own[name_of(eqn)])
        if name_of(eqn) not in moved:
            ordered.append(eqn)
    return ordered, {gather: name_of(cast) for gather, cast in own.items()}


def _ordered(
    eqns: Sequence[Any],
    visits: Sequence[Visit],
    waits: Mapping[Any, tuple[Any, ...]],
    apart: Mapping[Any, tuple[Any, ...]],
    env: dict[Any, Any],
) -> Iterator[Any]:
    """Yields the equations, with barriers before collectives and units.

    Args:
      eqns: Equations.
      visits: Visits of units.
      waits: Variables that a gather, or the cast before it, waits for, by its name.
      apart: Operands that are computed once, by the name of the equation from which on
        they are not computed again.
      env: Filled with what stands for the variables that units begin with, and for
        those in `apart`.
    """
    begins = {name_of(visit.first): visit.start for visit in visits if visit.first}
    unit, groups = None, [[], []]  # Results of reductions, unit by unit.
    for eqn in eqns:
        if once := [operand(env, v) for v in apart.get(name_of(eqn), ())]:
            barrier = barrier_of(once, eqn.source_info)
            env.update(zip(apart[name_of(eqn)], barrier.outvars, strict=True))
            yield barrier
        eqn = _with_operands(eqn, env)
        if start := begins.get(name_of(eqn)):
            yield from _after(eqn, start, groups[-2], env)
            eqn = _with_operands(eqn, env)
        own: dict[Any, Any] = {}
        if after := waits.get(name_of(eqn)):
            yield from _after(eqn, eqn.invars, after, own)
        elif is_reduction(eqn):
            if unit_in(eqn) != unit:
                unit, groups = unit_in(eqn), [*groups, []]
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
    names = [v for v in dict.fromkeys(variables) if is_var(v)]
    own = [operand(env, v) for v in names]
    others = [v for v in dict.fromkeys(after) if v not in own]
    if own and others:
        barrier = barrier_of([*own, *others], eqn.source_info)
        env.update(zip(names, barrier.outvars, strict=False))
        yield barrier


def _last_reads(
    eqns: Sequence[Any], visits: Sequence[Visit], prefetch: int
) -> list[tuple[Any, ...]]:
    """Returns for each visit what shows that weights gathered before it are read.

    These are the weights of the visit `prefetch` + 1 before. In forward the next unit
    begins with the results of all that reads them. In backward it need not: a product
    of weights with a gradient that is there from the beginning may run at any time.
    """
    place = {name_of(eqn): at for at, eqn in enumerate(eqns)}
    found: list[tuple[Any, ...]] = []
    for i, visit in enumerate(visits):
        before, begun = visits[max(i - prefetch - 1, 0)], visits[max(i - prefetch, 0)]
        # A unit computes beside those within it: its weights are needed until later.
        is_outer = begun.unit.startswith(f"{before.unit}.")
        if i <= prefetch or is_outer or not (visit.gathers and before.readers):
            found.append(())
            continue
        first = place[name_of(before.readers[0])]
        window = eqns[first : place[name_of(visit.gathers[0])]]
        known = _started(visits, i - prefetch)
        found.append(unimplied_reads(window, before.readers, known))
    return found


def _waits_of_gathers(
    visits: Sequence[Visit],
    prefetch: int,
    casts: Mapping[Any, Any],
    reads: Sequence[tuple[Any, ...]],
    begin: tuple[Any, ...],
) -> dict[Any, tuple[Any, ...]]:
    """Returns what each gather of units waits for, by the name of its cast or its own.

    Args:
      visits: Visits of units.
      prefetch: Number of units gathered ahead.
      casts: Name of the cast before a gather, by the gather's name.
      reads: For each visit what shows that the weights before it are read.
      begin: Variables that the first ones wait for.
    """
    waits: dict[Any, tuple[Any, ...]] = {}
    for i, visit in enumerate(visits):
        start = _started(visits, i - prefetch) if i >= prefetch else begin
        before = visits[i - 1].gathers if i else ()
        gathered = tuple(v for eqn in before for v in eqn.outvars)
        for eqn in visit.gathers:
            waits[casts.get(name_of(eqn), name_of(eqn))] = start + gathered + reads[i]
    return waits


def _possible(
    eqns: Sequence[Any], waits: Mapping[Any, tuple[Any, ...]]
) -> dict[Any, tuple[Any, ...]]:
    """Returns of what equations wait for what is there before they run.

    A loop may read the weights of more units than may be unsharded: the gathers of the
    last ones cannot wait for it.
    """
    made: dict[Any, int] = {v: at for at, e in enumerate(eqns) for v in e.outvars}
    place = {name_of(eqn): at for at, eqn in enumerate(eqns)}
    return {
        name: tuple(v for v in after if made.get(v, -1) < place[name])
        for name, after in waits.items()
    }


def _started(visits: Sequence[Visit], i: int) -> tuple[Any, ...]:
    """Returns variables that are there once unit `i`, and none before, computes."""
    # A unit that does not follow on the one before, such as the first one of a second
    # encoder, could begin while that one still computes.
    before = visits[i - 1].end if i and not visits[i].is_next else ()
    return visits[i].start + before
