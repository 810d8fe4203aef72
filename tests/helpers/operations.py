"""The arithmetic of a trace: its operations by shape, as often as they run."""

from __future__ import annotations

from collections import Counter
from typing import Any

from jax.extend import core


def operations(jaxpr: Any, kinds: tuple[str, ...], times: int = 1) -> Counter[str]:
    """Counts operations, those of a loop once an iteration.

    Args:
        jaxpr: Open jaxpr.
        kinds: Names of primitives.
        times: Number of times that the jaxpr runs.

    Returns:
        How often each operation runs, by its kind, operands and, of products, dims.
    """
    found: Counter[str] = Counter()
    for eqn in jaxpr.eqns:
        runs = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
        for inner in _called(eqn):
            found += operations(inner, kinds, runs)
        if eqn.primitive.name in kinds:
            dims = eqn.params.get("dimension_numbers", "")
            operands = ", ".join(str(v.aval) for v in eqn.invars)
            found[f"{eqn.primitive.name}({operands}) {dims}"] += runs
    return found


def counts_of(
    jaxpr: Any, primitive: str, ndim: int = 1, in_loop: bool = False
) -> tuple[int, int]:
    """Counts the arrays of so many dims or more that a primitive makes.

    Returns:
        Those made within loops, each once, and those made outside.
    """
    inside = outside = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == primitive and eqn.outvars[0].aval.ndim >= ndim:
            inside, outside = inside + in_loop, outside + (not in_loop)
        for inner in _called(eqn):
            within = in_loop or eqn.primitive.name == "scan"
            more = counts_of(inner, primitive, ndim, within)
            inside, outside = inside + more[0], outside + more[1]
    return inside, outside


def _called(eqn: Any) -> list[Any]:
    values = eqn.params.values()
    flat = [x for v in values for x in (v if isinstance(v, tuple | list) else (v,))]
    inner = [getattr(value, "jaxpr", value) for value in flat]
    return [jaxpr for jaxpr in inner if isinstance(jaxpr, core.Jaxpr)]
