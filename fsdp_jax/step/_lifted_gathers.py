"""Takes the gathers out of the body of a loop over units."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from jax.extend import core

from fsdp_jax._jaxpr import function_of
from fsdp_jax._scopes import (
    FSDP_GATHER,
    FSDP_SCAN,
    FSDP_UNSHARD,
    GATHERS,
    traced_function,
    unit_of,
)
from fsdp_jax.step._flat_trace import (
    CALLS,
    PLAIN_CALLS,
    REMAT,
    called,
    fresh,
    has_effects,
    operand,
    without_dead,
)
from fsdp_jax.step._remat_policy import Resharding


class NotLiftedError(Exception):
    """The gathers of a body cannot be taken out of it; the message says why."""


@dataclasses.dataclass(frozen=True)
class LiftedGathers:
    """The body of a loop over units, apart from its gathers.

    For a body `(shards, x) -> y` that runs `w = fsdp_unshard(shards)`, then `y = f(w,
    x)`, the two parts are `shards -> w` and `(w, x) -> y`.

    Attributes:
      gather: `gather(*leaves) -> values`: what the units' weights alone determine.
      read: Indices among the leaves of shards of those that `gather` reads.
      rest: `rest(*values, *others) -> results`, without those that are shards.
      passed: For each result of the body, the index of the shard that it is, unchanged;
        None for a result of `rest`.
    """

    gather: Callable[..., Sequence[Any]]
    read: tuple[int, ...]
    rest: Callable[..., Sequence[Any]]
    passed: tuple[int | None, ...]


def lift_gathers(body: Any, is_shard: Sequence[bool]) -> LiftedGathers | None:
    """Splits the body of a loop after the gathers of its units.

    Args:
      body: `ClosedJaxpr` of the body.
      is_shard: Whether each input is a leaf of a shard, one unit's slice of a stack.

    Returns:
      The parts; None if the body gathers none of these shards.

    Raises:
      NotLiftedError: If a gather reads something else besides, or is in an inner loop
        or branch, or the body uses a shard in another way.
    """
    jaxpr = body.jaxpr
    pairs = list(zip(jaxpr.invars, is_shard, strict=True))
    shards = [v for v, is_own in pairs if is_own]
    others = [v for v, is_own in pairs if not is_own]
    split = _Split(set(shards), _constants(jaxpr))
    split.walk(jaxpr.eqns)
    if not split.values:
        return None
    outvars = [operand(split.env, v) for v in jaxpr.outvars]
    places = {v: i for i, v in enumerate(shards)}
    passed = tuple(places.get(v) if isinstance(v, core.Var) else None for v in outvars)
    results = [v for v, at in zip(outvars, passed, strict=True) if at is None]
    rest = without_dead(split.rest, results)
    read = {v for eqn in rest for v in eqn.invars if isinstance(v, core.Var)}
    if (read | {v for v in results if isinstance(v, core.Var)}) & split.of_shards:
        raise NotLiftedError("the loop computes with shards outside of units")
    first = without_dead(split.first, split.values)
    used = {v for eqn in first for v in eqn.invars if isinstance(v, core.Var)}
    leaves = [v for v in shards if v in used]
    return LiftedGathers(
        function_of(body, leaves, split.values, first),
        tuple(places[v] for v in leaves),
        function_of(body, [*split.values, *others], results, rest),
        passed,
    )


class _Split:
    """Equations of a body, sorted into those of its gathers and all others.

    Attributes:
      first: Equations that depend on shards alone, the gathers included.
      rest: All other equations, and again those that depend on shards alone.
      values: Results of the gathers.
      of_shards: Variables that are shards, or depend on shards alone.
      env: Inlined variables.
    """

    def __init__(self, shards: set[Any], constants: set[Any]) -> None:
        self.first: list[Any] = []
        self.rest: list[Any] = []
        self.values: list[Any] = []
        self.of_shards = set(shards)
        self.env: dict[Any, Any] = {}
        self._constants = constants

    def walk(self, eqns: Iterable[Any]) -> None:
        for eqn in eqns:
            self._equation(
                eqn.replace(invars=[operand(self.env, v) for v in eqn.invars])
            )

    def _equation(self, eqn: Any) -> None:
        # `first` is to run an iteration ahead, and once more in backward. So it has
        # only equations that read shards and constants, without effects; of the others
        # none may read a shard, except to gather it. What depends on shards alone and
        # is not a gather stands in both parts, and is dropped where nobody reads it.
        read = {v for v in eqn.invars if isinstance(v, core.Var)} - self._constants
        name = eqn.primitive.name
        if not read & self.of_shards:
            self.rest.append(eqn)
        elif traced_function(eqn) == FSDP_UNSHARD:
            if not read <= self.of_shards:
                raise NotLiftedError("a gather reads more than shards")
            self.first.append(eqn)
            self.values += [v for v in eqn.outvars if not isinstance(v, core.DropVar)]
        elif traced_function(eqn) == FSDP_GATHER:
            raise NotLiftedError(
                "reshard_after_forward=False keeps all weights, so that backward has "
                "nothing to gather"
            )
        elif name in PLAIN_CALLS and gathers_in(called(eqn)[0]):
            self._inline(eqn)
        elif name in REMAT and gathers_in(called(eqn)[0]):
            if eqn.params["policy"] == Resharding(None):
                # It saves everything but weights, which are no longer made within.
                self._inline(eqn)
            else:
                self._checkpointed(eqn)
        elif any(map(gathers_in, programs(eqn))):
            raise NotLiftedError(f"an inner '{name}' enters a unit")
        else:
            if read <= self.of_shards and not has_effects(eqn):
                self.first.append(eqn)
                self.of_shards.update(eqn.outvars)
            self.rest.append(eqn)

    def _inline(self, eqn: Any) -> None:
        inner, consts = called(eqn)
        if consts:
            raise NotLiftedError("a jit within it closes over arrays")
        renamed = renamed_call(eqn, inner)
        self.walk(renamed.eqns)
        results = [operand(self.env, v) for v in renamed.outvars]
        self.env.update(zip(eqn.outvars, results, strict=True))

    def _checkpointed(self, eqn: Any) -> None:
        """Takes the gathers out of a checkpointed function, which gets their results.

        What it does not save it recomputes without them, from weights that backward has
        gathered by then.
        """
        inner, _ = called(eqn)
        renamed = renamed_call(eqn, inner)
        own = _Split(self.of_shards & set(eqn.invars), self._constants)
        own.walk(renamed.eqns)
        self.first += own.first
        self.values += own.values
        self.of_shards |= own.of_shards
        results = {}
        for made, v in zip(eqn.outvars, renamed.outvars, strict=True):
            result = operand(own.env, v)
            # Modules come out of `nnx.remat` with all that they hold.
            passes = isinstance(result, core.Var) and result in eqn.invars
            (self.env if passes else results)[made] = result
        outvars = list(results.values())
        eqns = without_dead(own.rest, outvars)
        # Inputs anew, by what is left to read: weights in the place of shards.
        made = {v for one in eqns for v in one.outvars}
        read = [v for one in eqns for v in one.invars] + outvars
        variables = dict.fromkeys(v for v in read if isinstance(v, core.Var))
        given = [v for v in variables if v not in made]
        env = {v: fresh(v) for v in given}
        body = inner.replace(
            invars=[env[v] for v in given],
            eqns=[substituted(one, env) for one in eqns],
            outvars=[operand(env, v) for v in outvars],
            debug_info=inner.debug_info.with_unknown_names(),
        )
        params = dict(eqn.params, jaxpr=body)
        if isinstance(prevent_cse := params["prevent_cse"], tuple):  # One an operand.
            params["prevent_cse"] = (any(prevent_cse),) * len(given)
        self.rest.append(
            eqn.replace(invars=given, outvars=list(results), params=params)
        )


def substituted(eqn: Any, env: dict[Any, Any]) -> Any:
    """Returns an equation on other operands."""
    return eqn.replace(invars=[operand(env, v) for v in eqn.invars])


def gathers_in(jaxpr: Any) -> bool:
    """Returns whether a jaxpr enters a unit, in calls, loops and branches as well."""
    return any(True for _ in _entries(jaxpr.eqns, ()))


def gathers_ahead(jaxpr: Any) -> bool:
    """Returns whether a jaxpr runs a loop that gathers ahead."""
    return any(name == FSDP_SCAN for name, _ in _entries(jaxpr.eqns, ()))


def gathers_in_loops(jaxpr: Any) -> bool:
    """Returns whether a jaxpr enters a unit within a loop or a branch."""
    return any(
        gathers_in_loops(called(eqn)[0])
        if eqn.primitive.name in CALLS
        else traced_function(eqn) not in GATHERS and any(map(gathers_in, programs(eqn)))
        for eqn in jaxpr.eqns
    )


def num_entries(jaxpr: Any) -> int:
    """Returns how often a jaxpr gathers the weights of units, but for inner loops."""
    return sum(
        (traced_function(eqn) == FSDP_UNSHARD)
        + (num_entries(called(eqn)[0]) if eqn.primitive.name in CALLS else 0)
        for eqn in jaxpr.eqns
    )


def units_entered(jaxpr: Any) -> list[str]:
    """Returns the units that a jaxpr enters, but those of loops that gather ahead."""
    entries = _entries(jaxpr.eqns, ())
    scopes = [scope for name, scope in entries if name != FSDP_SCAN]
    return list(dict.fromkeys(filter(None, map(unit_of, scopes))))


def nested_stacks(jaxpr: Any) -> set[str]:
    """Returns the units of stacks that loops run in loops that gather ahead."""
    found: set[str] = set()
    for eqn in jaxpr.eqns:
        is_loop = eqn.primitive.name == "scan"
        for inner in programs(eqn):
            found |= _stacks_run(inner) if is_loop else nested_stacks(inner)
    return found


def _stacks_run(jaxpr: Any) -> set[str]:
    scopes = [scope for name, scope in _entries(jaxpr.eqns, ()) if name == FSDP_SCAN]
    return {unit for unit in map(unit_of, scopes) if unit}


def _entries(eqns: Iterable[Any], outer: tuple[Any, ...]) -> Iterator[tuple[str, str]]:
    """Yields names and scopes of the functions that gather weights."""
    for eqn in eqns:
        scopes = *outer, eqn.source_info.name_stack
        if (name := traced_function(eqn)) in GATHERS:
            yield name, "/".join(map(str, scopes))
        if name != FSDP_SCAN:
            for inner in programs(eqn):
                yield from _entries(inner.eqns, scopes)


def programs(eqn: Any) -> Iterable[Any]:
    """Yields the jaxprs that an equation may run."""
    for value in eqn.params.values():
        for one in value if isinstance(value, (tuple, list)) else (value,):
            one = getattr(one, "jaxpr", one)
            if isinstance(one, core.Jaxpr):
                yield one


def _constants(jaxpr: Any) -> set[Any]:
    return set(jaxpr.constvars)


class RenamedCall(NamedTuple):
    """Equations and results of a jaxpr, with variables of their own."""

    eqns: list[Any]
    outvars: list[Any]


def renamed_call(call: Any, jaxpr: Any) -> RenamedCall:
    """Returns what a call runs, on its operands and in its scopes."""
    env = dict(zip(jaxpr.invars, call.invars, strict=True))
    eqns = []
    for eqn in jaxpr.eqns:
        new = [fresh(v) for v in eqn.outvars]
        stack = call.source_info.name_stack + eqn.source_info.name_stack
        info = eqn.source_info.replace(name_stack=stack)
        eqns.append(substituted(eqn, env).replace(outvars=new, source_info=info))
        env.update(zip(eqn.outvars, new, strict=True))
    return RenamedCall(eqns, [operand(env, v) for v in jaxpr.outvars])
