"""The programs within loops and conditions, and what of them is split over `tp`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend import core

from fsdp_jax.planner.liveness._operations import Program
from fsdp_jax.planner.liveness._tp_propagation import Dim

Flatten = Callable[[core.Jaxpr, Sequence[Dim]], tuple[Program, list[Dim]]]


@dataclasses.dataclass(frozen=True)
class Bodies:
    """What a loop runs, or a condition chooses from.

    Attributes:
      programs: The body of a loop, or branches.
      carry: Of a loop, where among the inputs its carry begins and ends.
      read: Of each input, the dim along which it is split.
      made: The same of each output.
    """

    programs: tuple[Program, ...]
    carry: tuple[int, int]
    read: tuple[Dim, ...]
    made: tuple[Dim, ...]


def bodies_of(eqn: Any, dims: Sequence[Dim], flatten: Flatten) -> Bodies | None:
    """What an equation has within; None if it is no loop and no condition.

    What a loop begins with, such as zeros, is split as what it hands on.

    Args:
      eqn: The equation.
      dims: Of each argument, the dim along which it is split.
      flatten: Makes a program of a jaxpr, and tells the dims of its results.
    """
    jaxprs = _jaxprs(eqn)
    if not jaxprs:
        return None
    first, (begin, end) = jaxprs[0], _carry(eqn, jaxprs[0])
    # Before these stand what a condition asks, and what that of a loop reads.
    outer = eqn.invars[len(eqn.invars) - len(first.invars) :]
    deeper = [_ndim(a) - _ndim(b) for a, b in zip(outer, first.invars, strict=True)]
    read = list(dims)
    while True:
        last = read[len(read) - len(outer) :]
        given = [_shifted(dim, -by) for dim, by in zip(last, deeper, strict=True)]
        found = [flatten(jaxpr, given) for jaxpr in jaxprs]
        made = [_agreed(own) for own in zip(*(own for _, own in found), strict=True)]
        carried = [
            b if a is None else a for a, b in zip(read[begin:end], made, strict=False)
        ]
        if carried == read[begin:end]:
            break
        read[begin:end] = carried
    made[: end - begin] = carried
    outs = zip(eqn.outvars, first.outvars, made, strict=True)
    made = [_shifted(dim, _ndim(a) - _ndim(b)) for a, b, dim in outs]
    programs = tuple(program for program, _ in found)
    return Bodies(programs, (begin, end), tuple(read), tuple(made))


def _jaxprs(eqn: Any) -> Sequence[core.Jaxpr]:
    if eqn.primitive.name == "scan":
        return [eqn.params["jaxpr"].jaxpr]
    if eqn.primitive.name == "while":
        return [eqn.params["body_jaxpr"].jaxpr]
    if eqn.primitive.name == "cond":
        branches = [branch.jaxpr for branch in eqn.params["branches"]]
        if platforms := eqn.params.get("branches_platforms"):
            return [branches[_of_cuda(platforms)]]
        return branches
    return []


def _of_cuda(platforms: Sequence[Sequence[str] | None]) -> int:
    """Which branch of `lax.platform_dependent` is for GPUs; None: for all others."""
    named = [i for i, names in enumerate(platforms) if names and "cuda" in names]
    return named[0] if named else list(platforms).index(None)


def _carry(eqn: Any, body: core.Jaxpr) -> tuple[int, int]:
    """By the dim that slices and what is stacked have more outside than within.

    Versions of jax keep the numbers in different forms.
    """
    if eqn.primitive.name == "cond":
        return 0, 0
    read = zip(reversed(eqn.invars), reversed(body.invars), strict=False)
    num_slices = sum(_ndim(outer) > _ndim(inner) for outer, inner in read)
    made = zip(eqn.outvars, body.outvars, strict=True)
    num_carried = sum(_ndim(outer) == _ndim(inner) for outer, inner in made)
    end = len(eqn.invars) - num_slices
    return end - num_carried, end


def _agreed(dims: Sequence[Dim]) -> Dim:
    """Of what branches make; whole if they make it in different layouts."""
    return dims[0] if len(set(dims)) == 1 else None


def _shifted(dim: Dim, by: int) -> Dim:
    return None if dim is None or dim + by < 0 else dim + by


def _ndim(v: Any) -> int:
    return v.aval.ndim
