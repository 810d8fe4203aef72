"""Nested programs of loops and conditionals, with their splits over `tp`."""

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
    """Nested programs of a loop or a conditional.

    Attributes:
      programs: Body of the loop, or branches of the conditional.
      carry: Start and end of a loop's carry among the inputs.
      read: Dim of each input that is split over `tp`.
      made: Dim of each output that is split over `tp`.
    """

    programs: tuple[Program, ...]
    carry: tuple[int, int]
    read: tuple[Dim, ...]
    made: tuple[Dim, ...]


def bodies_of(eqn: Any, dims: Sequence[Dim], flatten: Flatten) -> Bodies | None:
    """Returns the nested programs of an equation; None if it has none.

    The initial carry of a loop, such as zeros, is split as the carry that its body
    returns.

    Args:
      eqn: Equation.
      dims: Dim of each argument that is split over `tp`.
      flatten: Function from a jaxpr and the dims of its arguments to its program and
        the dims of its results.
    """
    jaxprs = _jaxprs(eqn)
    if not jaxprs:
        return None
    first, (begin, end) = jaxprs[0], _carry(eqn, jaxprs[0])
    # The leading arguments are not the body's: a branch index, or the constants of a
    # while loop's condition.
    outer = eqn.invars[len(eqn.invars) - len(first.invars) :]
    deeper = [_ndim(a) - _ndim(b) for a, b in zip(outer, first.invars, strict=True)]
    read = list(dims)
    # Iterate to a fixed point: a carry is split as its body returns it, which depends
    # on how the body's inputs are split.
    while True:
        last = read[len(read) - len(outer) :]
        given = [_shifted(dim, -by) for dim, by in zip(last, deeper, strict=True)]
        found = [flatten(jaxpr, given) for jaxpr in jaxprs]
        made = [_agreed(own) for own in zip(*(own for _, own in found), strict=True)]
        carry = [
            b if a is None else a for a, b in zip(read[begin:end], made, strict=False)
        ]
        if carry == read[begin:end]:
            break
        read[begin:end] = carry
    made[: end - begin] = carry
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
        return [branch.jaxpr for branch in eqn.params["branches"]]
    return []


def branch_for_gpus(eqn: Any) -> core.Jaxpr | None:
    """Returns the branch of a `lax.platform_dependent` that is compiled for GPUs.

    None if the equation is something else. XLA is given this branch alone, so what it
    computes is part of the program around it.
    """
    if not (platforms := eqn.params.get("branches_platforms")):
        return None
    return eqn.params["branches"][_of_cuda(platforms)].jaxpr


def _of_cuda(platforms: Sequence[Sequence[str] | None]) -> int:
    """Returns the index of the `lax.platform_dependent` branch for CUDA.

    That of the default, None, if no branch is for CUDA.
    """
    named = [i for i, names in enumerate(platforms) if names and "cuda" in names]
    return named[0] if named else list(platforms).index(None)


def _carry(eqn: Any, body: core.Jaxpr) -> tuple[int, int]:
    """Returns the start and end of a loop's carry among its inputs.

    Scanned inputs and stacked outputs have one dim more outside of the loop than
    inside. Versions of jax store the counts in different forms, so ndim is compared
    instead.
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
    """Returns the dim split in all branches; None if they differ."""
    return dims[0] if len(set(dims)) == 1 else None


def _shifted(dim: Dim, by: int) -> Dim:
    return None if dim is None or dim + by < 0 else dim + by


def _ndim(v: Any) -> int:
    return v.aval.ndim
