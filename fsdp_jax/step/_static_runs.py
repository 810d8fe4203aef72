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
from fsdp_jax.step._constant_leaves import without_constants

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
    arrays, _ = without_constants(stacked)
    return arrays[0].shape[0]


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


def choices_of(static: Sequence[Hashable]) -> np.ndarray:
    """Returns the index of each unit's value among the distinct ones."""
    values = list(dict.fromkeys(static))
    return np.asarray([values.index(value) for value in static], np.int32)


def runs_in_chunk(static: Sequence[Hashable], size: int) -> list[StaticRun]:
    """Returns the runs of a chunk of units, for all pipeline stages alike.

    Stages are one program, so that a unit has a static value only if the units at its
    place in all chunks have the same one.

    Args:
      static: Value of each unit of the stack; chunks are consecutive units.
      size: Number of units of a chunk.

    Returns:
      Runs whose value is the tuple of values that a unit chooses from as it runs.
    """
    every = tuple(dict.fromkeys(static))
    found = [tuple(dict.fromkeys(static[place::size])) for place in range(size)]
    return static_runs([one if len(one) == 1 else every for one in found])


def switched(unit: Unit) -> Unit:
    """Makes a unit that chooses among static values as it runs.

    Args:
      unit: Function `unit(weights, carry, *args, static=value)`.

    Returns:
      `unit(weights, carry, choice, *args, static=values)`, which runs `values[choice]`.
    """

    def choose(
        weights: PyTree, carry: PyTree, choice: Any, *args: PyTree, static: Any
    ) -> Any:
        branches = [functools.partial(unit, static=value) for value in static]
        if len(branches) == 1:
            return branches[0](weights, carry, *args)
        return jax.lax.switch(choice, branches, weights, carry, *args)

    return choose
