"""Follows gradients through a traced program, from their units to its results.

A gradient leaves its unit reduced over ranks and, mostly, as this device's piece. From
there on a `jax.custom_vjp` of the user may move it, add it and multiply it by a
constant. Any other operation would take a piece for the gradient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core

from fsdp_jax.step._dataflow import Dataflow
from fsdp_jax.step._grad_mark import GRADIENT
from fsdp_jax.step._unit_dims import Dims, are_in_place, moved, moves, weight_dims


@dataclasses.dataclass(frozen=True)
class Grad:
    """Fact: a variable holds a parameter's gradient, or slices of it.

    Attributes:
      name: Name of the parameter.
      ndim_in_unit: Number of dims of the parameter in its unit, without stacked ones.
      dims: Dim of the unit's gradient that each dim of the variable is, see `Dims`.
      once: Whether the variable holds all of what left the unit exactly once: not
        added twice, not scaled, not from one of several branches.
    """

    name: str
    ndim_in_unit: int
    dims: Dims
    once: bool = True

    @property
    def is_in_place(self) -> bool:
        """Whether each slice has the layout in which it left its unit."""
        return are_in_place(self.dims, self.ndim_in_unit)


@dataclasses.dataclass(frozen=True)
class Constant:
    """Fact: all elements are the same number, on all ranks.

    Attributes:
      is_zero: Whether the number is known to be 0.
    """

    is_zero: bool


@dataclasses.dataclass(frozen=True)
class Other:
    """Fact: any other value.

    Attributes:
      computed_from: Names of parameters whose gradients the value was computed from.
    """

    computed_from: frozenset[str] = frozenset()


Fact = Grad | Constant | Other
ZERO = Constant(is_zero=True)


def gradient_flow(jaxpr: core.Jaxpr, zeros: Sequence[Any] = ()) -> list[Fact]:
    """Returns a fact for each result of a program in which units produce gradients.

    Args:
      jaxpr: Program with equations made by `mark_gradient`.
      zeros: Input variables that are zeros, such as the gradient buffers of shards.
    """
    known = set(zeros)
    given: list[Fact] = [ZERO if v in known else Other() for v in jaxpr.invars]
    return _Flow().results(jaxpr, given)


class _Flow(Dataflow[Fact]):
    unknown = Other()

    def special(self, eqn, given):
        if eqn.primitive is not GRADIENT:
            return None
        name, ndim = eqn.params["name"], eqn.params["ndim_in_unit"]
        dims = weight_dims(len(eqn.outvars[0].aval.shape), ndim)
        return [Grad(name, ndim, dims)]

    def literal(self, literal):
        if literal.aval.shape:
            return Other()
        # The cotangent of an integer is a float0, which cannot be compared with 0.
        is_zero = literal.aval.dtype == jax.dtypes.float0 or bool(literal.val == 0)
        return Constant(is_zero)

    def constant(self, v):
        return Other() if v.aval.shape else Constant(is_zero=False)

    def primitive(self, eqn, given):
        rule = _RULES.get(eqn.primitive.name)
        if rule is None and moves(eqn):
            rule = _move
        if eqn.primitive.name == "optimization_barrier":  # One result an operand.
            return given
        result = rule(eqn, given) if rule else None
        return [_read(given) if result is None else result] * len(eqn.outvars)

    def join(self, one, other):
        return one if one == other else _sum(one, other) or _read((one, other))

    def sliced(self, fact):
        if not isinstance(fact, Grad):
            return fact
        first, *rest = fact.dims
        # A loop over a dim of the unit itself takes the gradient apart.
        rest = dataclasses.replace(fact, dims=tuple(rest))
        return rest if first is None else _read((fact,))

    def stacked(self, fact):
        if not isinstance(fact, Grad):
            return fact
        return dataclasses.replace(fact, dims=(None, *fact.dims))

    def in_loop(self, fact):
        return _again(fact)

    def in_branch(self, fact, predicate):
        return _again(fact)


def _again(fact: Fact) -> Fact:
    """Returns `fact`, no longer known to hold its gradient exactly once."""
    return dataclasses.replace(fact, once=False) if isinstance(fact, Grad) else fact


def _read(given: Sequence[Fact]) -> Other:
    """Returns the fact about a value computed from gradients, directly or not."""
    names = {fact.name for fact in given if isinstance(fact, Grad)}
    before = [fact.computed_from for fact in given if isinstance(fact, Other)]
    return Other(frozenset(names).union(*before))


def _sum(one: Fact, other: Fact) -> Fact | None:
    if isinstance(one, Constant) and isinstance(other, Constant):
        return Constant(is_zero=one.is_zero and other.is_zero)
    # Zeros of the gradient's shape: what accumulation starts with, or another branch.
    for zero, grad in ((one, other), (other, one)):
        if zero == ZERO and isinstance(grad, Grad):
            return _again(grad)
    if (
        isinstance(one, Grad)
        and isinstance(other, Grad)
        and _again(one) == _again(other)
    ):
        return _again(one)
    return None


def _add(eqn: Any, given: Sequence[Fact]) -> Fact | None:
    return _sum(*given)


def _scale(eqn: Any, given: Sequence[Fact]) -> Fact | None:
    one, other = given
    for fact, factor in ((one, other), (other, one)):
        if factor == ZERO or not isinstance(factor, Constant):
            continue
        # A constant divided by a gradient is not a scaled gradient.
        if isinstance(fact, Grad) and (fact is one or eqn.primitive.name == "mul"):
            return _again(fact)
    if ZERO in given and eqn.primitive.name == "mul":
        return ZERO
    if isinstance(one, Constant) and isinstance(other, Constant):
        return Constant(is_zero=one.is_zero)
    return None


def _negate(eqn: Any, given: Sequence[Fact]) -> Fact | None:
    return None if isinstance(given[0], Other) else _again(given[0])


def _move(eqn: Any, given: Sequence[Fact]) -> Fact | None:
    first, *others = given
    if eqn.primitive.name == "concatenate":
        for other in others:
            first = _sum(first, other) or _read((first, other))
    elif any(isinstance(other, Grad) for other in others):
        return None
    if not isinstance(first, Grad):
        return None if isinstance(first, Other) else first
    dims = moved(eqn, first.dims)
    if dims is None:
        return None
    whole = eqn.primitive.name in _WHOLE and _dtypes_agree(eqn)
    return dataclasses.replace(first, dims=dims, once=first.once and whole)


def _dtypes_agree(eqn: Any) -> bool:
    return eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype


# Moves that neither drop an element of a gradient nor repeat one.
_WHOLE = {"copy", "convert_element_type", "name", "rev", "reshape", "squeeze"} | {
    *("sharding_constraint", "transpose", "reduce_precision", "stop_gradient")
}


def _reduce(eqn: Any, given: Sequence[Fact]) -> Fact | None:
    (fact,), gone = given, eqn.params["axes"]
    if isinstance(fact, Constant):
        return fact if fact.is_zero else None
    if isinstance(fact, Other) or any(fact.dims[i] is not None for i in gone):
        return None
    # Only stacked dims are summed, as in the transpose of a broadcast over a stack.
    dims = tuple(dim for i, dim in enumerate(fact.dims) if i not in gone)
    return dataclasses.replace(fact, dims=dims, once=False)


def _pad(eqn: Any, given: Sequence[Fact]) -> Fact | None:
    fact, value = given
    if value != ZERO or isinstance(fact, Other):
        return None
    if isinstance(fact, Constant):
        return fact if fact.is_zero else None
    pairs = zip(fact.dims, eqn.params["padding_config"], strict=True)
    # Zeros around slices of a stack are fine, zeros within a slice are not.
    if any(dim is not None and any(widths) for dim, widths in pairs):
        return None
    return _again(fact)


def _update(eqn: Any, given: Sequence[Fact]) -> Fact | None:
    """Rule of a slice written into an array: it must span each of the unit's dims."""
    operand, update = given[:2]
    result = _sum(operand, update)
    if isinstance(result, Grad):
        sizes = [v.aval.shape for v in eqn.invars[:2]]
        triples = zip(result.dims, *sizes, strict=True)
        if any(dim is not None and a != b for dim, a, b in triples):
            return None
    return result


def _scatter_add(eqn: Any, given: Sequence[Fact]) -> Fact | None:
    """Rule of `scatter-add`, the transpose of indexing a stack with an array."""
    operand, _, update = given
    if isinstance(update, Constant):
        return _sum(operand, update)
    if not isinstance(update, Grad):
        return None
    # Dims of the operand in `gone` are indexed; the window dims of the update are the
    # operand's other dims, in order.
    numbers = eqn.params["dimension_numbers"]
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    shape, updated = (eqn.invars[i].aval.shape for i in (0, 2))
    window = iter(numbers.update_window_dims)
    dims: list[int | None] = []
    for place, size in enumerate(shape):
        source = None if place in gone else next(window)
        dim = None if source is None else update.dims[source]
        if dim is not None and updated[source] != size:
            return None
        dims.append(dim)
    if sum(d is not None for d in dims) != sum(d is not None for d in update.dims):
        return None
    return _sum(operand, dataclasses.replace(update, dims=tuple(dims), once=False))


_RULES = {
    "add": _add,
    "add_any": _add,
    "sub": _add,
    "mul": _scale,
    "div": _scale,
    "neg": _negate,
    "reduce_sum": _reduce,
    "pad": _pad,
    "dynamic_update_slice": _update,
    "scatter-add": _scatter_add,
}
