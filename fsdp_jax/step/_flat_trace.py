"""A trace with the calls inlined in which units gather and reduce."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core

from fsdp_jax._scopes import GATHERS, HELD, is_in, traced_function
from fsdp_jax.step._remat_policy import Resharding

REMAT = ("checkpoint", "remat", "remat2")
PLAIN_CALLS = ("jit", "pjit", "closed_call", "eval_jaxpr")
"""Calls that run a jaxpr as it is; jax 0.12 has `eval_jaxpr` for `closed_call`."""
CALLS = (*REMAT, *PLAIN_CALLS)
_COLLECTIVES = ("all_gather", "reduce_scatter", "all_to_all", "psum", "pmax")


class FlatTrace:
    """A jaxpr with the calls inlined in which units gather or reduce.

    The barriers of `hold_gathers` are left out.

    Attributes:
      eqns: Equations.
      outvars: Results.
      consts: Values of constants by their variable.
      of_shards: Variables that depend on shards and constants alone.
    """

    def __init__(self, closed: Any, shards: set[Any]) -> None:
        """Inlines the calls of `closed`; `shards` are those of its inputs."""
        self.eqns: list[Any] = []
        self.consts = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        self.of_shards = set(shards)
        self._env: dict[Any, Any] = {}
        self._walk(closed.jaxpr.eqns, self._env, None)
        self.outvars = [operand(self._env, v) for v in closed.jaxpr.outvars]

    def _walk(self, eqns: Iterable[Any], env: dict[Any, Any], outer: Any) -> None:
        for eqn in eqns:
            given = [operand(env, v) for v in eqn.invars]
            if is_held(eqn):
                env.update(zip(eqn.outvars, given, strict=True))
                continue
            info = eqn.source_info
            if outer is not None:
                stack = outer + info.name_stack
                info = info.replace(name_stack=stack)
            if not _opens(eqn):
                new = [fresh(v) for v in eqn.outvars]
                env.update(zip(eqn.outvars, new, strict=True))
                self._add(eqn.replace(invars=given, outvars=new, source_info=info))
                continue
            if is_recomputed(eqn):
                given = self._apart(eqn.params["policy"], given, info)
            inner, consts = called(eqn)
            own = dict(zip(inner.invars, given, strict=True))
            for v, value in zip(inner.constvars, consts, strict=True):
                own[v] = fresh(v)
                self.consts[own[v]] = value
            self._walk(inner.eqns, own, info.name_stack)
            results = [operand(own, v) for v in inner.outvars]
            env.update(zip(eqn.outvars, results, strict=True))

    def _apart(self, policy: Any, given: list[Any], info: Any) -> list[Any]:
        """Keeps recomputed values apart from those of forward, as jax does.

        jax puts one barrier around all operands of a checkpointed function. The shards
        get one of their own, or their gather would wait for the other operands. Where
        all activations are saved, there is nothing else to keep apart: a barrier would
        make XLA write each of them, and not fuse those that are cheap into backward.
        """
        variables = dict.fromkeys(v for v in given if isinstance(v, core.Var))
        moved: dict[Any, Any] = {}
        saves_all = policy == Resharding(None)
        for own in (True,) if saves_all else (True, False):
            group = [v for v in variables if (v in self.of_shards) == own]
            if group:
                barrier = barrier_of(group, info)
                moved.update(zip(group, barrier.outvars, strict=True))
                self._add(barrier)
        return [moved.get(v, v) if isinstance(v, core.Var) else v for v in given]

    def _add(self, eqn: Any) -> None:
        self.eqns.append(eqn)
        read = (v for v in eqn.invars if isinstance(v, core.Var))
        if not has_effects(eqn) and all(
            v in self.of_shards or v in self.consts for v in read
        ):
            self.of_shards.update(eqn.outvars)


def is_held(eqn: Any) -> bool:
    """Returns whether an equation is a barrier of `hold_gathers`."""
    is_barrier = eqn.primitive.name == "optimization_barrier"
    return is_barrier and is_in(eqn.source_info.name_stack, HELD)


def is_var(v: Any) -> bool:
    """Returns whether an operand is a variable, and no literal."""
    return isinstance(v, core.Var)


def name_of(eqn: Any) -> Any:
    """Returns a variable that stands for an equation; None if it has no result."""
    return eqn.outvars[0] if eqn.outvars else None


def operand(env: dict[Any, Any], v: Any) -> Any:
    """Returns what stands for an operand; literals stand for themselves."""
    return v if isinstance(v, core.Literal) else env.get(v, v)


def fresh(v: Any) -> Any:
    """Returns a new variable like `v`."""
    # The body of a call may be inlined several times, each with variables of its own.
    return v if isinstance(v, core.DropVar) else core.Var(v.aval)


def called(eqn: Any) -> tuple[Any, Sequence[Any]]:
    """Returns the jaxpr that a call runs, and its constants."""
    jaxpr = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    if isinstance(jaxpr, core.ClosedJaxpr):
        return jaxpr.jaxpr, jaxpr.consts
    return jaxpr, ()


def calling(eqn: Any, jaxpr: Any, consts: Sequence[Any]) -> Any:
    """Returns a call, or a loop, that runs another jaxpr."""
    name = "jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"
    if isinstance(eqn.params[name], core.ClosedJaxpr):
        jaxpr = core.ClosedJaxpr(jaxpr, consts)
    return eqn.replace(params=eqn.params | {name: jaxpr})


def is_recomputed(eqn: Any) -> bool:
    """Returns whether an equation is the recomputation of a checkpointed function."""
    if eqn.primitive.name not in REMAT or not eqn.params["differentiated"]:
        return False
    prevent_cse = eqn.params["prevent_cse"]  # A bool, or one for each operand.
    return any(prevent_cse) if isinstance(prevent_cse, tuple) else prevent_cse


def _opens(eqn: Any) -> bool:
    """Returns whether an equation is a call that runs collectives of units."""
    name = eqn.primitive.name
    if name == "custom_vjp_call":
        return traced_function(eqn) in GATHERS
    return name in CALLS and _communicates(called(eqn)[0])


def _communicates(jaxpr: Any) -> bool:
    """Returns whether a jaxpr runs a collective, outside of loops and branches."""
    return any(
        eqn.primitive.name in _COLLECTIVES
        or eqn.primitive.name == "shard_map"
        and _communicates(called(eqn)[0])
        or _opens(eqn)
        for eqn in jaxpr.eqns
    )


def is_collective(eqn: Any) -> bool:
    """Returns whether an equation is a collective, or one manual over `tp`."""
    name = eqn.primitive.name
    return name in _COLLECTIVES or (
        name == "shard_map" and _communicates(called(eqn)[0])
    )


def has_effects(eqn: Any) -> bool:
    """Returns whether an equation does more than compute its results."""
    # A collective has the effect of naming its mesh axes, which is none at run time.
    return any(type(e).__name__ != "NamedAxisEffect" for e in eqn.effects)


def barrier_of(variables: Sequence[Any], info: Any) -> Any:
    """Makes an equation whose results are `variables` once all of them are there."""
    return core.new_jaxpr_eqn(
        list(variables),
        [core.Var(v.aval) for v in variables],
        _primitive(),
        {},
        core.no_effects,
        info,
    )


@functools.cache
def _primitive() -> Any:
    # Found by a trace, since jax does not publish it.
    (eqn,) = jax.make_jaxpr(lax.optimization_barrier)(1.0).jaxpr.eqns
    return eqn.primitive


def without_dead(eqns: Sequence[Any], outvars: Sequence[Any]) -> list[Any]:
    """Drops equations whose results nobody reads."""
    live = {v for v in outvars if isinstance(v, core.Var)}
    kept = []
    for eqn in reversed(eqns):
        if has_effects(eqn) or not live.isdisjoint(eqn.outvars):
            kept.append(eqn)
            live.update(v for v in eqn.invars if isinstance(v, core.Var))
    return kept[::-1]
