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


def _called(eqn: Any) -> list[Any]:
    values = eqn.params.values()
    flat = [x for v in values for x in (v if isinstance(v, tuple | list) else (v,))]
    inner = [getattr(value, "jaxpr", value) for value in flat]
    return [jaxpr for jaxpr in inner if isinstance(jaxpr, core.Jaxpr)]
