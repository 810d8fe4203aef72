"""Follows shards through the trace of a loss: gathered by a unit, or misused.

The errors that a `Shard` raises do not cover every misuse: a loss that maps over the
leaves of its model computes with the arrays in shards as if they were weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from fsdp_jax._scopes import FSDP_STACK, GATHERS, traced_function
from fsdp_jax.step._dataflow import Dataflow
from fsdp_jax.step._unit_dims import Dims, are_in_place, moved, moves, weight_dims

MANY = 2
"""A count of more than one gather, or of one that may not happen."""


@dataclasses.dataclass
class Uses:
    """The number of gathers of each shard, and the misused shards.

    Attributes:
      gathers: Name -> 0, 1, or `MANY`. A stack that a loop gathers slice by slice has
        the count of a slice.
      misread: Names of shards that the loss computes with, or returns, as if they were
        weights.
      rearranged: Names of shards gathered after their elements were moved.
      cast: Name -> dtype of shards gathered after a cast.
    """

    gathers: dict[str, int]
    misread: set[str] = dataclasses.field(default_factory=set)
    rearranged: set[str] = dataclasses.field(default_factory=set)
    cast: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class _Tracked:
    """Fact: a variable holds a shard, or slices of it.

    Attributes:
      name: Name of the parameter.
      ndim_in_unit: Number of dims of the parameter in its unit, without stacked ones.
      dims: Dim of the unit's shard that each dim of the variable is, see `Dims`; None
        if its elements were moved.
      many: Whether a gather of the variable may be one of several, or may not happen:
        in a loop or a branch, or of slices that were moved.
      dtype: Dtype to which the shard was cast; None if it was not.
    """

    name: str
    ndim_in_unit: int
    dims: Dims | None
    many: bool = False
    dtype: str | None = None


@dataclasses.dataclass(frozen=True)
class _Chosen:
    """Fact: a variable holds what one branch of a `cond` has made.

    jax saves what the branches of forward need for backward in the same arrays, where
    shapes and dtypes agree: in one branch a shard, in another one a shard of another
    parameter, an activation or zeros. The same branch of backward reads it.

    Attributes:
      branches: Fact of each branch.
    """

    branches: tuple[_Fact, ...]


_Fact: TypeAlias = "_Tracked | _Chosen | None"


def uses_of_shards(jaxpr: Any, shards: Mapping[Any, tuple[str, int]]) -> Uses:
    """Follows shards through the program of a loss.

    Args:
      jaxpr: Trace of the loss as a function of shards and other arguments.
      shards: Input variable -> `(name, ndim_in_unit)` of its parameter, for each input
        that is a shard.

    Returns:
      The gathers of all shards, and their misuses.
    """
    uses = Uses(dict.fromkeys((name for name, _ in shards.values()), 0))
    given = []
    for v in jaxpr.invars:
        name, ndim = shards.get(v, ("", 0))
        dims = weight_dims(len(v.aval.shape), ndim)
        given.append(_Tracked(name, ndim, dims) if name else None)
    returned = _Follow(uses).results(jaxpr, given)
    uses.misread |= _names(returned)
    return uses


_MOVE_ALL_OPERANDS = ("concatenate", "optimization_barrier")
"""Primitives that move all operands; others move the first, and may take indices."""


class _Follow(Dataflow["_Fact"]):
    """An interpreter that records in `uses` how shards are gathered or misused."""

    unknown = None

    def __init__(self, uses: Uses) -> None:
        super().__init__()
        self._uses = uses

    def special(self, eqn, given):
        if any(given) and not is_gather(eqn):
            return None
        # Results of a gather are weights, which the loss may use as it likes.
        for tracked in _all_tracked(given):
            self._gathered(tracked)
        return [None] * len(eqn.outvars)

    def primitive(self, eqn, given):
        kind = eqn.primitive.name
        num_moved = (
            0 if not moves(eqn) else len(given) if kind in _MOVE_ALL_OPERANDS else 1
        )
        self._uses.misread |= _names(given[num_moved:])
        results = [_each(lambda t: _moved(eqn, t), fact) for fact in given[:num_moved]]
        if kind == "optimization_barrier":  # One result an operand.
            return results
        return [_joined(results)] * len(eqn.outvars)

    def join(self, one, other):
        if one is None or other is None:
            # A loop may begin with zeros of the same layout.
            return self.in_loop(one or other)
        if len(names := _names([one, other])) > 1:
            self._uses.misread |= names
        return _joined([one, other])

    def join_branches(self, facts):
        if all(fact == facts[0] for fact in facts):
            return facts[0]
        return _Chosen(tuple(facts))

    def of_branch(self, fact, branch, num_branches):
        if isinstance(fact, _Chosen) and len(fact.branches) == num_branches:
            return fact.branches[branch]
        return fact

    def sliced(self, fact):
        def slice_of(tracked):
            if tracked.dims is None:
                return tracked
            # A loop over a dim of the unit itself takes the shard apart.
            first, *rest = tracked.dims
            dims = tuple(rest) if first is None else None
            return dataclasses.replace(tracked, dims=dims)

        return _each(slice_of, fact)

    def stacked(self, fact):
        def stack_of(tracked):
            dims = None if tracked.dims is None else (None, *tracked.dims)
            return dataclasses.replace(tracked, dims=dims)

        return _each(stack_of, self.in_loop(fact))

    def in_loop(self, fact):
        return _each(lambda tracked: dataclasses.replace(tracked, many=True), fact)

    def in_branch(self, fact, predicate):
        return self.in_loop(fact)

    def _gathered(self, tracked: _Tracked) -> None:
        # Passes to a loop's fixed point would count a gather more than once.
        if not self.recording:
            return
        name, uses = tracked.name, self._uses
        uses.gathers[name] = MANY if tracked.many or uses.gathers[name] else 1
        if tracked.dims is None or not are_in_place(tracked.dims, tracked.ndim_in_unit):
            uses.rearranged.add(name)
        if tracked.dtype:
            uses.cast[name] = tracked.dtype


def is_gather(eqn: Any) -> bool:
    """Returns whether an equation gathers shards, by itself or in units it runs."""
    return eqn.primitive.name == FSDP_STACK or traced_function(eqn) in GATHERS


def _moved(eqn: Any, tracked: _Tracked) -> _Tracked:
    dims = None if tracked.dims is None else moved(eqn, tracked.dims)
    dtype = eqn.outvars[0].aval.dtype
    if (
        eqn.primitive.name != "convert_element_type"
        or dtype == eqn.invars[0].aval.dtype
    ):
        dtype = tracked.dtype
    return dataclasses.replace(
        tracked, dims=dims, many=True, dtype=str(dtype) if dtype else None
    )


def _joined(given: Sequence[_Fact]) -> _Fact:
    """Returns the fact about an array that holds one of several shards, or parts."""
    if not given or all(fact == given[0] for fact in given):
        return given[0] if given else None
    first, *others = tracked = [*_all_tracked(given)]
    same = all(other.dims == first.dims for other in others) and all(given)
    dtypes = [one.dtype for one in tracked]
    return dataclasses.replace(
        first,
        dims=first.dims if same else None,
        many=any(one.many for one in tracked),
        dtype=next(filter(None, dtypes), None),
    )


def _each(fn: Callable[[_Tracked], _Tracked], fact: _Fact) -> _Fact:
    """Returns the fact with `fn` of what is tracked in it."""
    if isinstance(fact, _Chosen):
        return _Chosen(tuple(_each(fn, one) for one in fact.branches))
    return fn(fact) if fact else None


def _all_tracked(given: Iterable[_Fact]) -> Iterator[_Tracked]:
    for fact in given:
        if isinstance(fact, _Chosen):
            yield from _all_tracked(fact.branches)
        elif fact:
            yield fact


def _names(given: Iterable[_Fact]) -> set[str]:
    return {tracked.name for tracked in _all_tracked(given)}
