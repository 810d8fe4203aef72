"""Evaluates parts of jaxprs as functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.extend import core


def function_of(closed, invars, outvars, eqns) -> Callable[..., Sequence[Any]]:
    """Returns a function of positional inputs that evaluates `eqns`.

    Args:
      closed: Jaxpr that the equations are from; its constants are kept.
      invars: Variables of the function's inputs.
      outvars: Variables of its results.
      eqns: Equations to evaluate.
    """
    jaxpr = closed.jaxpr.replace(
        invars=list(invars),
        outvars=list(outvars),
        eqns=list(eqns),
        # The original names of arguments and results need not fit the new ones.
        debug_info=closed.jaxpr.debug_info.with_unknown_names(),
    )
    evaluate = core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, closed.consts))
    literals = {
        place: _as_array(v)
        for place, v in enumerate(jaxpr.outvars)
        if isinstance(v, core.Literal)
    }
    if not literals:
        return evaluate
    # A literal is evaluated to a Python scalar, which has no dtype.
    return lambda *given: [
        literals.get(place, result) for place, result in enumerate(evaluate(*given))
    ]


def _as_array(literal: Any) -> np.ndarray:
    return np.asarray(literal.val, literal.aval.dtype)
