"""On which mesh axes a value differs from rank to rank, and what that would hang.

All ranks take part in a collective, or those that do wait for the others forever. So
none may be in a branch, or a loop, that some ranks enter and others do not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from fsdp_jax._tree import PyTree
from fsdp_jax.step._dataflow import Dataflow

Axes = frozenset[str]
"""Mesh axes along which a value may differ."""

ASSUMED = "fsdp_assume_replicated"


def assume_replicated(tree: PyTree) -> PyTree:
    """Vouches that arrays are equal on all ranks, and returns them unchanged.

    A unit gathers its weights from all ranks, so all ranks have to run it equally
    often. `fsdp_jax` therefore refuses a unit under a `jax.lax.cond`, `switch` or
    `while_loop` that depends on a rank's own rows or keys. Where ranks agree for a
    reason that the program does not show, say so with this function. If they do not
    agree, the step hangs, or mixes the gradients of different branches.

    A predicate that ranks agree on by a collective, as in
    `fsdp_jax.ops.masked_count(flag) > 0`, needs no vouching.

    Args:
      tree: Pytree of arrays: a predicate, an index of a branch, the carry of a loop.

    Returns:
      The same arrays.

    >>> import jax.numpy as jnp
    >>> import fsdp_jax as fsdp
    >>> bool(fsdp.assume_replicated(jnp.array(True)))
    True
    """
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, ASSUMED), tree)


@dataclasses.dataclass(frozen=True, order=True)
class Divided:
    """A collective that not all of its ranks may come to.

    Attributes:
      unit: The unit that it is in; empty if it is in none.
      kind: What decides: "cond" or "while".
      collective: The primitive.
      axes: Those of its axes along which the decision may differ.
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
    """Collectives under a decision that ranks may take differently.

    Args:
      jaxpr: Of what one rank runs.
      given: Along which axes each input differs.
      axes: All axes of more than one device.
      is_unit: Which equations count as a collective over all axes.

    Returns:
      The collectives, and along which axes each result differs.
    """
    ranks = _Ranks(axes, is_unit)
    results = ranks.results(jaxpr, given)
    return sorted(ranks.divided), results


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
        # Undocumented, and for the error alone.
        scope = getattr(eqn.source_info, "name_stack", "")
        unit = _UNIT.search(str(scope))
        self._units.append(unit[1] if unit else self._units[-1])
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
            # Not followed: whatever is in it may make ranks differ.
            for program in inner:
                self._look_into(program)
            return [self._axes] * len(eqn.outvars)
        if name == "axis_index":
            return [own]
        if not own or name in _LOCAL:
            return [everywhere] * len(eqn.outvars)
        self._meet(name, own)
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
        """Of a `shard_map` within the step, over `tp`, which the step leaves to XLA."""
        body, specs = eqn.params["jaxpr"], eqn.params["in_specs"]
        inside = [
            fact | set(jax.tree.leaves(tuple(spec)))
            for fact, spec in zip(given, specs, strict=True)
        ]
        manual = frozenset().union(*inside) - frozenset().union(*given)
        return [fact - manual for fact in self.results(body, inside)]


# The scope of `call_unit`; backward has it within `transpose(jvp(...))`.
_UNIT = re.compile(r"unit:([^/()]+)")
# Name a mesh axis and send nothing.
_LOCAL = ("axis_index", "pvary", "pcast", "mesh_cast")
# Whose result is the same on all ranks that take part.
_AGREE = ("psum", "pmax", "pmin", "all_gather")


def _axes_of(eqn: Any) -> Axes:
    """Mesh axes that an equation names; positional ones, as of a sum, are numbers."""
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
