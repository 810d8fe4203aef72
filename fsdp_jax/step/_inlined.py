"""A trace with all calls of jitted functions inlined."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jax.extend import core

from fsdp_jax.step._flat_trace import CALLS, REMAT, called, fresh, operand


def inlined(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Returns the same program with the equations of jitted functions for their calls.

    A call is one equation, whatever results it has: optax corrects the moments of all
    parameters in one.

    Args:
      closed: Trace of a function.
    """
    jaxpr = closed.jaxpr
    consts = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    env: dict[Any, Any] = {}
    eqns: list[Any] = []
    _inline(jaxpr.eqns, env, eqns, consts)
    flat = jaxpr.replace(
        constvars=list(consts),
        eqns=eqns,
        outvars=[operand(env, v) for v in jaxpr.outvars],
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    return core.ClosedJaxpr(flat, list(consts.values()))


def _inline(
    body: Iterable[Any], env: dict[Any, Any], eqns: list[Any], consts: dict[Any, Any]
) -> None:
    """Appends the equations of `body`, its variables as `env` says."""
    for eqn in body:
        given = [operand(env, v) for v in eqn.invars]
        # A checkpointed function is a call too, but its equations are to stay apart.
        if eqn.primitive.name not in CALLS or eqn.primitive.name in REMAT:
            new = [fresh(v) for v in eqn.outvars]
            env.update(zip(eqn.outvars, new, strict=True))
            eqns.append(eqn.replace(invars=given, outvars=new))
            continue
        inner, values = called(eqn)
        own = dict(zip(inner.invars, given, strict=True))
        for v, value in zip(inner.constvars, values, strict=True):
            own[v] = fresh(v)
            consts[own[v]] = value
        _inline(inner.eqns, own, eqns, consts)
        results = [operand(own, v) for v in inner.outvars]
        env.update(zip(eqn.outvars, results, strict=True))
