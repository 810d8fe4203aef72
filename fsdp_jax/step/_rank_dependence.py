"""Finds collectives under control flow that ranks may take differently.

A collective hangs unless all of its ranks run it. So none may be in a branch or a loop
whose predicate differs from rank to rank. The analysis follows, for each value, the
mesh axes along which it may differ.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from fsdp_jax._scopes import units_in
from fsdp_jax._tree import PyTree
from fsdp_jax.step._dataflow import Dataflow

Axes = frozenset[str]
"""Mesh axes along which a value may differ."""

ASSUMED = "fsdp_assume_replicated"


def assume_replicated(tree: PyTree) -> PyTree:
    """Declares arrays equal on all ranks, and returns them unchanged.

    A unit gathers its weights from all ranks, so all ranks have to run it equally
    often. `fsdp_jax` therefore refuses a unit under a `jax.lax.cond`, `switch` or
    `while_loop` that depends on a rank's own rows or keys. Use this function where
    ranks agree for a reason that the program does not show. If they do not agree, the
    step hangs, or mixes the gradients of different branches.

    A predicate that is reduced over ranks by a collective, as in
    `fsdp_jax.ops.masked_count(flag) > 0`, needs no declaration.

    Args:
      tree: Pytree of arrays, such as a predicate, the index of a branch, or the carry
        of a loop.

    Returns:
      The same arrays.

    >>> import jax.numpy as jnp
    >>> import fsdp_jax as fsdp
    >>> bool(fsdp.step.assume_replicated(jnp.array(True)))
    True
    """
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, ASSUMED), tree)


@dataclasses.dataclass(frozen=True, order=True)
class Divided:
    """A collective that some of its ranks may not reach.

    Attributes:
      unit: Path of the unit that runs the collective; empty outside of units.
      kind: Control flow around the collective: "cond" or "while".
      collective: Name of the primitive.
      axes: Mesh axes of the collective along which the predicate may differ.
    """

    unit: str
    kind: str
    collective: str
    axes: tuple[str, ...]


def divided_collectives(
    jaxpr: core.Jaxpr,
    given: Sequence[Axes],
    axes: Axes,
    *,
    is_unit: Callable[[Any], bool] = lambda eqn: False,
) -> tuple[list[Divided], list[Axes]]:
    """Returns collectives under a predicate that may differ from rank to rank.

    Args:
      jaxpr: Program of one rank.
      given: Axes along which each input differs.
      axes: All mesh axes of more than one device.
      is_unit: Predicate of equations that count as a collective over all axes.

    Returns:
      The collectives, sorted, and the axes along which each result differs.
    """
    ranks = _Ranks(axes, is_unit)
    results = ranks.results(jaxpr, given)
    return sorted(ranks.divided), results


# The rules, `own` being the axes that an equation names:
#
#     equation                                axes along which its results may differ
#     arithmetic, indexing, ...               those of all operands
#     axis_index                              own
#     psum, pmax, pmin, all_gather            those of the operand, less own
#     all_to_all, ppermute, psum_scatter      those of the operand, and own
#     cond, while                             those of the bodies, and of the predicate
#     a program that is not interpreted       all
#
# A set that is too large refuses a program that would run; one that is too small lets a
# step hang. So where nothing is known the larger one is taken. No rule shrinks as its
# operands grow and there are few axes, so the fixed point of a loop is reached.
#
# `_deciding` holds the predicates around the equation at hand: a collective over an
# axis along which one of them differs may be run by some of its ranks alone.
class _Ranks(Dataflow[Axes]):
    unknown: Axes = frozenset()

    def __init__(self, axes: Axes, is_unit: Callable[[Any], bool]) -> None:
        super().__init__()
        self.divided: set[Divided] = set()
        self._axes = axes
        self._is_unit = is_unit
        self._deciding: list[tuple[str, Axes]] = []
        self._units: list[str] = [""]

    def equation(self, eqn, given):
        # `name_stack` is undocumented; it is read for the error message alone.
        scope = getattr(eqn.source_info, "name_stack", "")
        self._units.append(next(iter(units_in(scope)), self._units[-1]))
        try:
            return super().equation(eqn, given)
        finally:
            self._units.pop()

    def special(self, eqn, given):
        name = eqn.primitive.name
        if name == "name" and eqn.params["name"] == ASSUMED:
            return [frozenset()]
        if self._is_unit(eqn):
            self._meet("gather", self._axes)
        if name == "shard_map" and "in_specs" in eqn.params:
            return self._shard_map(eqn, given)
        return None

    def primitive(self, eqn, given):
        name, own = eqn.primitive.name, _axes_of(eqn) & self._axes
        everywhere = frozenset().union(*given)
        if name == "optimization_barrier":
            return given
        if inner := list(_programs_in(eqn)):
            # Not interpreted, so any axis in it may make the results differ.
            for program in inner:
                self._look_into(program)
            return [self._axes] * len(eqn.outvars)
        if name == "axis_index":
            return [own]
        if not own or name in _LOCAL:
            return [everywhere] * len(eqn.outvars)
        self._meet(name, own)
        # With groups, ranks agree within their group alone.
        if eqn.params.get("axis_index_groups") is None and name.startswith(_AGREE):
            facts = [fact - own for fact in given]
            return facts if len(facts) == len(eqn.outvars) else [everywhere - own]
        return [everywhere | own] * len(eqn.outvars)

    def join(self, one, other):
        return one | other

    def in_branch(self, fact, predicate):
        return fact | predicate

    @contextlib.contextmanager
    def under(self, kind: str, predicate: Axes) -> Iterator[None]:
        self._deciding.append((kind, predicate))
        try:
            yield
        finally:
            self._deciding.pop()

    def _look_into(self, program: core.Jaxpr) -> None:
        for eqn in program.eqns:
            if own := _axes_of(eqn) & self._axes:
                self._meet(eqn.primitive.name, own)
            for inner in _programs_in(eqn):
                self._look_into(inner)

    def _meet(self, collective: str, own: Axes) -> None:
        for kind, predicate in self._deciding:
            if collective not in _LOCAL and (axes := own & predicate):
                unit = self._units[-1]
                self.divided.add(Divided(unit, kind, collective, tuple(sorted(axes))))

    def _shard_map(self, eqn: Any, given: Sequence[Axes]) -> list[Axes]:
        """Rule of a `shard_map` within the step, which is over `tp` alone."""
        body, specs = eqn.params["jaxpr"], eqn.params["in_specs"]
        # Within, an input differs along `tp` too where its spec splits it. Outside, XLA
        # sees global arrays along `tp`, so the results do not differ along it.
        inside = [
            fact | set(jax.tree.leaves(tuple(spec)))
            for fact, spec in zip(given, specs, strict=True)
        ]
        manual = frozenset().union(*inside) - frozenset().union(*given)
        return [fact - manual for fact in self.results(body, inside)]


# Primitives that name a mesh axis but communicate nothing.
_LOCAL = ("axis_index", "pvary", "pcast", "mesh_cast")
# Collectives with the same result on all participating ranks.
_AGREE = ("psum", "pmax", "pmin", "all_gather")


def _axes_of(eqn: Any) -> Axes:
    """Returns the mesh axes that an equation names; array axes of a sum are ints."""
    named = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    named = (named,) if isinstance(named, str) else named
    if not isinstance(named, (tuple, list, frozenset)):
        return frozenset()
    return frozenset(axis for axis in named if isinstance(axis, str))


def _programs_in(eqn: Any) -> Iterator[core.Jaxpr]:
    for value in eqn.params.values():
        for one in value if isinstance(value, (tuple, list)) else (value,):
            one = getattr(one, "jaxpr", one)
            if isinstance(one, core.Jaxpr):
                yield one
