"""How long gathered weights are in memory, by what reads them.

Weights are there until the last equation that computes with them. But XLA may fuse a
lookup in a table into each reader of its result, backward included, and then the table
stays to the end of the step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fsdp_jax.step._dataflow import Dataflow
from fsdp_jax.step._flat_trace import is_var, name_of

# Operations that XLA does not compute again in each fusion that reads their results.
_COMPUTED_ONCE = (
    "conv_general_dilated",
    "dot_general",
    "optimization_barrier",
    "ragged_dot_general",
    "sort",
)
_LOOPS = ("scan", "while")


def unimplied_reads(
    eqns: Sequence[Any], readers: Sequence[Any], known: Sequence[Any]
) -> tuple[Any, ...]:
    """Returns what must be there beside some variables once weights are not needed.

    Args:
      eqns: Equations, from the first that reads the weights on.
      readers: Equations that compute with the weights.
      known: Variables that are there.

    Returns:
      Results of readers on which neither `known` nor another reader depends.
    """
    names = {name_of(eqn) for eqn in readers}
    needed, found = set(known), []
    for eqn in reversed(eqns):
        is_needed = not needed.isdisjoint(eqn.outvars)
        if name_of(eqn) in names and not is_needed:
            found.append(name_of(eqn))
        if is_needed or name_of(eqn) in names:
            needed.update(filter(is_var, eqn.invars))
    return tuple(found)


def recomputable(
    eqns: Sequence[Any], gathers: Sequence[Any], of_shards: set[Any]
) -> dict[Any, tuple[Any, ...]]:
    """Finds operands that XLA might compute again from weights that are gone by then.

    Vectors are left out: they are small, and biases are added to every product.

    Args:
      eqns: Equations.
      gathers: Those of them that gather weights.
      of_shards: Variables that depend on shards and constants alone.

    Returns:
      Such operands, by the name of the first equation that reads them then. Those that
      are computed from such an operand are left out, as if it were computed once.
    """
    sources = _sources(eqns, gathers, of_shards)
    last: dict[int, int] = {}
    for at, eqn in enumerate(eqns):
        if name_of(eqn) not in of_shards:
            for v in filter(is_var, eqn.invars):
                last.update(dict.fromkeys(sources.get(v, ()), at))
    flow, until = _FusedReads(), dict[Any, float]()
    found: dict[Any, tuple[Any, ...]] = {}
    for at, eqn in enumerate(eqns):
        if name_of(eqn) in of_shards:
            continue
        late = [v for v in filter(is_var, eqn.invars) if until.get(v, at) < at]
        if late and name_of(eqn) is not None:
            found[name_of(eqn)] = tuple(dict.fromkeys(late))
            until.update(dict.fromkeys(late, math.inf))
        ends = [
            until.get(v, min((last[i] for i in sources.get(v, ())), default=math.inf))
            if is_var(v)
            else math.inf
            for v in eqn.invars
        ]
        until.update(zip(eqn.outvars, flow.equation(eqn, ends), strict=True))
    return found


def _sources(
    eqns: Sequence[Any], gathers: Sequence[Any], of_shards: set[Any]
) -> dict[Any, frozenset[int]]:
    """Returns the gathered matrices that variables of shards are made of, by number."""
    results = (v for eqn in gathers for v in eqn.outvars)
    gathered = {v: number for number, v in enumerate(results)}
    sources: dict[Any, frozenset[int]] = {}
    for eqn in eqns:
        if name_of(eqn) not in of_shards:
            continue
        given = [sources.get(v, frozenset()) for v in eqn.invars if is_var(v)]
        together = frozenset[int]().union(*given)
        for v in eqn.outvars:
            own = gathered.get(v) if v.aval.ndim > 1 else None
            sources[v] = together if own is None else together | {own}
    return sources


class _FusedReads(Dataflow[float]):
    """Fact: until which equation weights are there that a value may be made of."""

    unknown = math.inf

    def primitive(self, eqn: Any, given: Sequence[float]) -> Sequence[float]:
        """A result is made of all operands, unless it is computed once."""
        is_once = eqn.primitive.name in _COMPUTED_ONCE
        end = math.inf if is_once else min(given, default=math.inf)
        return [end] * len(eqn.outvars)

    def special(self, eqn: Any, given: Sequence[float]) -> Sequence[float] | None:
        """XLA computes no loop again."""
        del given
        is_loop = eqn.primitive.name in _LOOPS
        return [math.inf] * len(eqn.outvars) if is_loop else None

    def join(self, one: float, other: float) -> float:
        """What may be made of either is made of what is gone first."""
        return min(one, other)
