"""A stack of units whose gathers are apart from what they compute."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from fsdp_jax._scopes import HELD, PREFETCH
from fsdp_jax._tree import PyTree
from fsdp_jax.step._collectives import gather_weight
from fsdp_jax.step._float_partition import FloatPartition
from fsdp_jax.step._gathered import Gathered, of_gathered
from fsdp_jax.step._pullback import Pullback
from fsdp_jax.step._remat_policy import savable
from fsdp_jax.step._shard import Shard
from fsdp_jax.step._split_unit import split_variants
from fsdp_jax.step._static_runs import StaticRun

Leaves = list[Array]
"""Values of one unit: its gathered weights, and what depends on these alone."""


@dataclasses.dataclass
class TracedUnit:
    """Facts that are known once a unit is traced.

    Attributes:
      results: The partition of its results.
      pulls: Its pullback, for each variant.
    """

    results: Any = None
    pulls: dict[Any, Pullback] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Stack:
    """A stack of units, split after their gathers, with the settings of its scan.

    Attributes:
      weights_only: `weights_only(shards) -> values`: gathers a unit's weights and
        computes what depends on these alone.
      rests: `rest(values, *leaves) -> leaves`: everything else the unit computes, by
        static value.
      out_tree: Structure of the results of `rest`, `(carry, y)`.
      arguments: Partition of `(carry, slices, consts)` into leaves with and without
        gradients.
      runs: Runs of units with the same static value; those of all units, in order.
      prefetch: Distance from the unit that computes to the one being gathered.
      unroll: Units in one iteration of the loop.
      policy: `jax.checkpoint` policy for a unit's activations; None saves all.
      is_nested: Whether it runs within a loop of the model. What it gathers then waits
        for its carry, or jax would gather once for all iterations of that loop.
      keeps_window: Whether backward begins with the units that forward ended with and
        that stay unsharded: those of the last stack that runs, alone.
      traced: Facts that are known once a unit is traced.
    """

    weights_only: Callable[..., Sequence[Array]]
    rests: dict[Any, Callable[..., Sequence[Array]]]
    out_tree: Any
    arguments: FloatPartition
    runs: Sequence[StaticRun]
    prefetch: int
    unroll: int
    policy: Callable[..., bool] | None
    is_nested: bool = False
    keeps_window: bool = True
    traced: TracedUnit = dataclasses.field(default_factory=TracedUnit)

    @property
    def num_units(self) -> int:
        """Number of units, the leading dim of each shard."""
        return self.runs[-1].stop

    @classmethod
    def of(cls, compute, shards, given, prefetch: int, unroll: int, runs) -> Stack:
        carry, slices, consts = given
        example = (carry, jax.tree.map(_first, slices), consts)
        # All units have the shapes of the first, so one trace serves them all.
        first = jax.tree.map(_first, shards)
        computes = {None: compute}
        if runs is not None:
            computes = {v: functools.partial(compute, static=v) for v, *_ in runs}
        weights_only, rests, out_tree = split_variants(
            [of_gathered(compute) for compute in computes.values()],
            _unshard,
            first,
            example,
            may_close_over=False,
        )
        return cls(
            weights_only,
            dict(zip(computes, rests, strict=True)),
            out_tree,
            FloatPartition.of(*example),
            runs or [StaticRun(None, 0, shards[0].value.shape[0])],
            prefetch,
            unroll,
            shards[0].param.unit_policy.remat_policy,
        )

    def values(self, shards: list[Shard], i: Any) -> Leaves:
        """Returns the values of unit `i`, gathered.

        From `num_units` on, indices run back: `num_units` is the last unit again,
        `num_units + 1` the one before it, so that the last gathers of forward are the
        first ones that backward needs. Indices below 0 are clamped to unit 0.
        """
        # n -> n-1, n+1 -> n-2, ...; indices below n stay.
        i = jnp.minimum(i, 2 * self.num_units - 1 - i)
        return list(self.weights_only(unit_at(shards, jnp.maximum(i, 0))))

    def window(
        self, shards: list[Shard], i: int, start: PyTree
    ) -> tuple[list[Shard], list[Leaves]]:
        """Returns the shards to gather from, and the values of the first units.

        Args:
          shards: Parameters of the stack.
          i: First unit, counted as in `values`.
          start: Arrays that differ in each iteration of a loop around the stack.
        """
        start = jax.tree.leaves(start)[:1]
        if self.is_nested and start:
            pieces = [shard.value for shard in shards]
            with jax.named_scope(HELD):
                _, pieces = lax.optimization_barrier((start, pieces))
            shards = _with_pieces(shards, pieces)
        return shards, [
            self.values(shards, i + ahead) for ahead in range(self.prefetch)
        ]

    def shift(
        self, shards: list[Shard], window: list[Leaves], i: Any
    ) -> tuple[list[Leaves], Leaves]:
        """Returns `window`, and the values of unit `i`, gathered after those in it.

        XLA combines gathers that do not depend on each other into one collective, which
        must complete before the first of their values can be used. The barrier makes
        the gather of unit `i` depend on the units in the window.
        """
        pieces = [shard.value for shard in shards]
        pieces, window = lax.optimization_barrier((pieces, window))
        with jax.named_scope(PREFETCH):
            return window, self.values(_with_pieces(shards, pieces), i)

    def unit(self, static, values, carry, slices, consts, others):
        """Runs one unit on floating-point leaves; its other results are aux."""

        def run(values, carry, slices, consts, others):
            args = self.arguments.join((carry, slices, consts), others)
            leaves = self.rests[static](values, *jax.tree.leaves(args))
            out = self.out_tree.unflatten(leaves)
            results = self.traced.results = FloatPartition.of(*out)
            return results.floats(out), results.others(out)

        if self.policy:
            run = jax.checkpoint(run, policy=savable(self.policy))
        return run(values, carry, slices, consts, others)


def _with_pieces(shards: Sequence[Shard], pieces: Sequence[Any]) -> list[Shard]:
    pairs = zip(shards, pieces, strict=True)
    return [dataclasses.replace(shard, value=piece) for shard, piece in pairs]


def with_gradients(values: Leaves, grads: Leaves | None = None) -> Leaves:
    """Returns the values of a unit that have gradients, or their gradients.

    Float8 bits of weights are integers, and have none.

    Args:
      values: Values of a unit.
      grads: Gradient of each value; None to return values.
    """
    pairs = zip(values, values if grads is None else grads, strict=True)
    return [found for value, found in pairs if _is_float(value)]


def as_cotangents(values: Sequence[Array], grads: Leaves) -> list[Any]:
    """Returns a cotangent for each value of a unit from those that have gradients."""
    given = iter(grads)
    return [
        next(given) if _is_float(x) else np.zeros(x.shape, jax.dtypes.float0)
        for x in values
    ]


def _is_float(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def unit_at(tree: PyTree, i: Any) -> PyTree:
    """Returns the slices of unit `i` of a tree of stacks."""
    return jax.tree.map(
        lambda leaf: lax.dynamic_index_in_dim(leaf, i, 0, keepdims=False), tree
    )


def _unshard(shards: Sequence[Shard]) -> list[Gathered]:
    return [gather_weight(shard) for shard in shards]


def _first(leaf: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
