"""Gathers that stay in the loop that runs them.

A loop may run the same units in each iteration, as a model does that is applied several
times. Their gathers depend on no iteration, so jax takes them out of the loop when it
differentiates it, and XLA does in any case: the weights of all these units would be
unsharded while the loop runs. `hold_gathers` lets each wait for what its unit reads.
This would also keep a unit from being gathered ahead, so `order_units` takes the
barriers out again, once the loop is differentiated, and adds its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
from jax import lax
from jax.extend import core

from fsdp_jax._scopes import FSDP_UNSHARD, HELD, traced_function
from fsdp_jax.step._flat_trace import CALLS, called, calling, is_held
from fsdp_jax.step._lifted_gathers import renamed_call, substituted


def hold_gathers(body: Any, varying: Iterable[Any], values: Iterable[Any]) -> Any:
    """Adds barriers before the gathers in the body of a loop.

    Args:
      body: Open jaxpr of one iteration.
      varying: Its inputs that differ from iteration to iteration.
      values: Its inputs that are values of shards.

    Returns:
      A jaxpr with the same inputs, outputs and values. A gather stays as it is where
      nothing is there that differs from iteration to iteration.
    """
    varying, values = dict.fromkeys(varying), set(values)
    eqns: list[Any] = []
    env: dict[Any, Any] = {}
    for eqn in body.eqns:
        own = [v for v in eqn.invars if isinstance(v, core.Var)]
        if traced_function(eqn) == FSDP_UNSHARD:
            shards = [v for v in dict.fromkeys(own) if v in values]
            start = next(filter(_is_float, varying), None)
            if start is not None and shards:
                eqns += _barrier(eqn, shards, start, env)
                eqn = substituted(eqn, env)
        elif eqn.primitive.name in CALLS:
            eqn = _called_held(eqn, varying, values)
        if not varying.keys().isdisjoint(own):
            varying |= dict.fromkeys(eqn.outvars)
        eqns.append(eqn)
    debug_info = body.debug_info.with_unknown_names()
    return body.replace(eqns=eqns, debug_info=debug_info)


def has_held(jaxpr: Any) -> bool:
    """Returns whether a jaxpr has such barriers, outside of loops and branches."""
    return any(
        is_held(eqn) or (eqn.primitive.name in CALLS and has_held(called(eqn)[0]))
        for eqn in jaxpr.eqns
    )


def _called_held(eqn: Any, varying: Any, values: Any) -> Any:
    inner, consts = called(eqn)
    pairs = list(zip(inner.invars, eqn.invars, strict=True))
    new = hold_gathers(
        inner,
        [v for v, given in pairs if isinstance(given, core.Var) and given in varying],
        [v for v, given in pairs if isinstance(given, core.Var) and given in values],
    )
    return calling(eqn, new, consts)


def _barrier(
    eqn: Any, shards: list[Any], start: Any, env: dict[Any, Any]
) -> Iterable[Any]:
    """Returns equations behind which shards are there once `start` is.

    Args:
      eqn: Gather of the shards.
      shards: Variables.
      start: Variable.
      env: Filled with what stands for the shards.
    """

    def hold(start, *shards):
        # Without a gradient, which would be one of the shards' values too.
        with jax.named_scope(HELD):
            return lax.optimization_barrier((lax.stop_gradient(start), *shards))[1:]

    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in (start, *shards)]
    traced = jax.make_jaxpr(hold)(*avals).jaxpr
    renamed = renamed_call(eqn.replace(invars=[start, *shards]), traced)
    env.update(zip(shards, renamed.outvars, strict=True))
    return renamed.eqns


def _is_float(v: Any) -> bool:
    return jax.numpy.issubdtype(v.aval.dtype, jax.numpy.floating)
