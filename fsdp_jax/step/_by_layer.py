"""Which equations of an update compute each layer of a stack by itself.

An update is traced twice: for stacks of all layers and for stacks of one layer. The
equations are the same, and arrays whose shapes differ are the stacks. An equation that
computes an element of its result from the same element of its operands computes a layer
from that layer, so that it can run in a loop over layers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.core import Tracer
from jax.extend import core

ELEMENTWISE = frozenset(
    """
    abs add add_any and cbrt clamp convert_element_type copy div eq exp exp2 expm1 ge gt
    integer_pow is_finite le log log1p logistic lt max min mul ne neg not or pow
    reduce_precision rsqrt select_n sign sqrt square sub tanh
    """.split()
)
"""Primitives that compute an element from the same elements of their operands."""


class LoopOverLayers(NamedTuple):
    """A part of an update of which one layer after the other is computed.

    Attributes:
      before: Indices of the equations that run once, before the loop.
      inside: Indices of the equations that run for each layer.
      stacks: Variables that the loop reads a layer at a time.
      constants: Variables that each iteration reads alike.
      results: Variables that the loop makes, a layer at a time, each with the stack
        whose place it takes.
    """

    before: list[int]
    inside: list[int]
    stacks: list[Any]
    constants: list[Any]
    results: dict[Any, Any]


class TwoTraces:
    """The traces of an update for all layers and for one.

    Args:
      full: Trace for stacks of all layers.
      single: Trace of the same function for stacks of one layer.

    Attributes:
      single: Trace for stacks of one layer.
      of_one: For each variable of the full trace, that of the other.
    """

    def __init__(self, full: core.ClosedJaxpr, single: core.ClosedJaxpr):
        self._eqns, self._consts = full.jaxpr.eqns, full.consts
        self._constvars = {*full.jaxpr.constvars}
        self._results = {v for v in full.jaxpr.outvars if isinstance(v, core.Var)}
        self.single = single
        self.of_one = dict(_variables(full.jaxpr, single.jaxpr))

    @property
    def are_alike(self) -> bool:
        """Whether both traces have the same equations, but for the sizes of stacks."""
        one = self.single.jaxpr.eqns
        consts = zip(self._consts, self.single.consts, strict=False)
        return (
            len(self._eqns) == len(one)
            and len(self._consts) == len(self.single.consts)
            and all(_is_same_constant(*pair) for pair in consts)
            and all(map(self._is_same, self._eqns, one))
        )

    def loop(
        self, part: Sequence[int], on_host: Collection[Any], places: Mapping[Any, Any]
    ) -> LoopOverLayers | None:
        """Returns a part of the update as a loop over layers, or None if it is none.

        Args:
          part: Indices of the part's equations, in program order.
          on_host: Variables whose values are in host memory.
          places: For each result that returns to host memory, the argument whose place
            it takes.
        """
        before, needed = set[int](), set[Any]()
        for at in reversed(part):
            eqn = self._eqns[at]
            if not self._is_by_layer(at) or not needed.isdisjoint(eqn.outvars):
                before.add(at)
                needed.update(_read(eqn))
        inside = [at for at in part if at not in before]
        results = {v: places.get(v) for v in self._needed_after(inside)}
        # It saves nothing where a stack is fetched as a whole, or made on the device.
        if not inside or not needed.isdisjoint(on_host):
            return None
        if not all(old in on_host for old in results.values()):
            return None
        made = {v for at in inside for v in self._eqns[at].outvars}
        read = dict.fromkeys(
            v
            for at in inside
            for v in _read(self._eqns[at])
            if v not in made and v not in self._constvars
        )
        stacks = [v for v in read if self._is_stack(v)]
        sizes = {v.aval.shape[0] for v in (*stacks, *results) if self._is_stack(v)}
        if len(sizes) != 1 or not all(map(self._is_stack, results)):
            return None
        constants = [v for v in read if not self._is_stack(v)]
        ordered = [at for at in part if at in before]
        return LoopOverLayers(ordered, inside, stacks, constants, results)

    def _is_same(self, eqn: Any, other: Any) -> bool:
        return eqn.primitive is other.primitive and all(
            self.of_one.get(v) is w if isinstance(v, core.Var) else _is_literal(v, w)
            for v, w in zip(eqn.invars, other.invars, strict=True)
        )

    def _is_stack(self, v: Any) -> bool:
        return _is_stack(v, self.of_one.get(v, v))

    def _is_by_layer(self, at: int) -> bool:
        return _is_by_layer(self._eqns[at], self.single.jaxpr.eqns[at])

    def _needed_after(self, inside: Sequence[int]) -> list[Any]:
        """Returns what equations make that are results, or that others read."""
        own = {*inside}
        others = (eqn for at, eqn in enumerate(self._eqns) if at not in own)
        read = self._results.union(*map(_read, others))
        return [v for at in inside for v in self._eqns[at].outvars if v in read]


def _variables(full: Any, single: Any) -> Iterator[tuple[Any, Any]]:
    yield from zip(full.constvars, single.constvars, strict=False)
    yield from zip(full.invars, single.invars, strict=False)
    for eqn, other in zip(full.eqns, single.eqns, strict=False):
        yield from zip(eqn.outvars, other.outvars, strict=False)


def _read(eqn: Any) -> list[Any]:
    return [v for v in eqn.invars if isinstance(v, core.Var)]


def _is_stack(v: Any, one: Any) -> bool:
    return v.aval.shape != one.aval.shape


def _is_by_layer(eqn: Any, one: Any) -> bool:
    """Whether an equation makes a stack, each layer of it from those of its operands.

    Args:
      eqn: Equation of the full trace.
      one: The same equation, for one layer.
    """
    results = list(zip(eqn.outvars, one.outvars, strict=True))
    operands = list(zip(eqn.invars, one.invars, strict=True))
    if not all(_is_stack(*pair) and _has_layers(*pair) for pair in results):
        return False
    stacks = [pair for pair in operands if _is_stack(*pair)]
    if not all(_has_layers(*pair) for pair in stacks):
        return False
    if eqn.primitive.name == "broadcast_in_dim":
        dims = eqn.params["broadcast_dimensions"]
        return dims == one.params["broadcast_dimensions"] and (
            not stacks or dims[0] == 0
        )
    return eqn.primitive.name in ELEMENTWISE and eqn.params == one.params


def _is_literal(v: Any, w: Any) -> bool:
    return isinstance(w, core.Literal) and bool(np.all(v.val == w.val))


def _is_same_constant(a: Any, b: Any) -> bool:
    if a is b:
        return True
    is_traced = isinstance(a, Tracer) or isinstance(b, Tracer)
    return not is_traced and np.array_equal(a, b)


def _has_layers(v: Any, one: Any) -> bool:
    shape, single = v.aval.shape, one.aval.shape
    return len(shape) == len(single) and single[:1] == (1,) and shape[1:] == single[1:]
