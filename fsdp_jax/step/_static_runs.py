"""Units of a stack that differ in what is known when they are traced."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fsdp_jax._tree import PyTree

Unit = Callable[..., tuple[PyTree, PyTree]]


class StaticRun(NamedTuple):
    """Consecutive units with the same static value.

    Attributes:
      value: The value.
      start: Index of the first unit.
      stop: Index behind the last one.
    """

    value: Hashable
    start: int
    stop: int


def static_runs(static: Sequence[Hashable]) -> list[StaticRun]:
    """Returns the runs of equal values, in order."""
    runs, start = [], 0
    for value, equal in groupby(static):
        stop = start + len(list(equal))
        runs.append(StaticRun(value, start, stop))
        start = stop
    return runs


def num_units(stacked: PyTree) -> int:
    """Returns the number of units of a stack."""
    return jax.tree.leaves(stacked)[0].shape[0]


def check_static(static: Sequence[Hashable], units: int) -> None:
    """Refuses values of another number than that of the units."""
    if len(static) != units:
        raise ValueError(
            f"fsdp.scan(static=...) has {len(static)} values for a stack of {units} "
            "units: it takes one for each."
        )


def part_of(stacked: PyTree, run: StaticRun) -> PyTree:
    """Returns the slices of a run's units; all of them as they are."""

    def cut(leaf: Any) -> Any:
        is_all = run.stop - run.start == leaf.shape[0]
        return leaf if is_all else leaf[run.start : run.stop]

    return jax.tree.map(cut, stacked)


def join_runs(made: Sequence[PyTree]) -> PyTree:
    """Joins what the runs return, along the dim of the units."""
    if len(made) == 1:
        return made[0]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *made)


def switched(unit: Unit, static: Sequence[Hashable]) -> tuple[Unit, np.ndarray]:
    """Makes a unit that chooses among the static values as it runs.

    Args:
      unit: Function `unit(weights, carry, *args, static=value)`.
      static: Value of each unit.

    Returns:
      `unit(weights, carry, choice, *args)`, and the choice of each unit.
    """
    values = list(dict.fromkeys(static))
    branches = [functools.partial(unit, static=value) for value in values]

    def choose(weights: PyTree, carry: PyTree, choice: Any, *args: PyTree) -> Any:
        return jax.lax.switch(choice, branches, weights, carry, *args)

    return choose, np.asarray([values.index(value) for value in static], np.int32)
