"""A scan over units whose weights are gathered before they are needed.

While unit i computes, unit i + 1 is being gathered; backward mirrors that, and reduces
the gradients of unit i + 1 while unit i computes. Compilers move no collective from one
iteration of a loop to another, so the loop is written such that it stands there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from fsdp_jax._tree import PyTree
from fsdp_jax.step._collectives import gather_weight, marked_zeros
from fsdp_jax.step._float_partition import Mixed
from fsdp_jax.step._grad_mark import mark_gradient
from fsdp_jax.step._remat import split_unit, without_float8
from fsdp_jax.step._shard import Shard

Leaves = list[Array]


def prefetching_scan(
    compute: Callable[..., tuple[PyTree, PyTree]],
    shards: Sequence[Shard],
    carry: PyTree,
    slices: PyTree,
    consts: PyTree,
    *,
    prefetch: int,
    unroll: int,
) -> tuple[PyTree, PyTree]:
    """Runs a stack of units, each gathered `prefetch` units ahead.

    `prefetch + 1` units are whole at a time, and with more than 1 ahead XLA makes a
    copy of one; in backward there are besides the gradients of one unit before they are
    reduced, and this device's piece of those of the one before it. The units that are
    whole when forward ends are those that backward begins with.

    Args:
      compute: `compute(weights, carry, slices, consts) -> (carry, y)`.
      shards: The stack's own parameters, a leading dim `units` on each.
      carry: What goes from unit to unit.
      slices: Trees with the same leading dim, one slice for each unit.
      consts: Trees that every unit sees whole.
      prefetch: How many units ahead of the one that computes are gathered, at least 1.
      unroll: Units in one iteration of the compiled loop.

    Returns:
      The last carry, and the `y`s stacked on a new leading dim.
    """
    shards = list(shards)
    given = (carry, slices, consts)
    stack = _Stack.of(compute, shards, given, prefetch, unroll)

    @jax.custom_vjp
    def fsdp_scan(shards, floats, others):
        return _forward(stack, shards, floats, others)[0]

    def forward(shards, floats, others):
        out, *saved = _forward(stack, shards, floats, others)
        return out, (shards, saved, floats[1:], others[1:])

    def backward(residuals, cotangents):
        return _backward(stack, residuals, cotangents)

    fsdp_scan.defvjp(forward, backward)
    out, others = fsdp_scan(
        shards, stack.arguments.floats(given), stack.arguments.others(given)
    )
    carry, ys = stack.traced["results"].join(out, others)
    return carry, ys


@dataclasses.dataclass(frozen=True)
class _Stack:
    """Units cut behind what depends on their weights alone, and how they are run.

    Attributes:
      weights_only: `weights_only(shards) -> values`: gathers a unit's weights and does
        what the unit does to these alone.
      rest: `rest(values, *leaves) -> leaves`: everything else the unit computes.
      out_tree: The structure of what that is.
      arguments: Which leaves of `(carry, slices, consts)` have gradients.
      num_units: How many there are.
      prefetch: How many units ahead are gathered.
      unroll: Units in one iteration of the loop.
      policy: What of a unit's activations is saved for backward; None for all.
      traced: What tracing a unit told: "results", a `Mixed`, and "pull", a `_Pull`.
    """

    weights_only: Callable[..., Sequence[Array]]
    rest: Callable[..., Sequence[Array]]
    out_tree: Any
    arguments: Mixed
    num_units: int
    prefetch: int
    unroll: int
    policy: Callable[..., bool] | None
    traced: dict[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, compute, shards, given, prefetch: int, unroll: int) -> _Stack:
        carry, slices, consts = given
        example = (carry, jax.tree.map(_first, slices), consts)
        first = jax.tree.map(_first, shards)
        weights_only, rest, out_tree = split_unit(
            compute, _unshard, first, example, may_close_over=False
        )
        return cls(
            weights_only,
            rest,
            out_tree,
            Mixed.of(*example),
            shards[0].value.shape[0],
            prefetch,
            unroll,
            shards[0].row.remat_policy,
        )

    def values(self, shards: list[Shard], i: Any) -> Leaves:
        """The gathered values of unit `i`.

        Behind the last unit the numbers run backwards, as backward will; before the
        first one there is only that.
        """
        i = jnp.minimum(i, 2 * self.num_units - 1 - i)
        return list(self.weights_only(_at(shards, jnp.maximum(i, 0))))

    def shift(
        self, shards: list[Shard], window: list[Leaves], i: Any
    ) -> tuple[list[Leaves], Leaves]:
        """The values in `window`, and those of unit `i`, gathered after them.

        Gathers that do not depend on each other XLA sends as one, which then is waited
        for as a whole where the first is needed.
        """
        pieces = [shard.value for shard in shards]
        pieces, window = lax.optimization_barrier((pieces, window))
        tied = [
            dataclasses.replace(shard, value=piece)
            for shard, piece in zip(shards, pieces, strict=True)
        ]
        with jax.named_scope("prefetch"):
            return window, self.values(tied, i)

    def unit(self, values, carry, slices, consts, others):
        """One unit as a function of floating-point leaves; other results are aux."""

        def run(values, carry, slices, consts, others):
            args = self.arguments.join((carry, slices, consts), others)
            leaves = self.rest(values, *jax.tree.leaves(args))
            out = self.out_tree.unflatten(leaves)
            results = self.traced["results"] = Mixed.of(*out)
            return results.floats(out), results.others(out)

        if self.policy:
            run = jax.checkpoint(run, policy=without_float8(self.policy))
        return run(values, carry, slices, consts, others)


def _forward(stack: _Stack, shards, floats, others):
    """The results, what backward needs of each unit, and the values it begins with.

    Returns `((carry, ys), (other carry, other ys)), saved, window`.
    """
    carry, slices, consts = floats
    other_carry, other_slices, other_consts = others

    def body(state, x):
        carry, other_carry, window = state
        i, slices, other_slices = x
        window, ahead = stack.shift(shards, window, i + stack.prefetch)
        others = (other_carry, other_slices, other_consts)

        def of_floats(values, carry, slices, consts):
            return stack.unit(values, carry, slices, consts, others)

        (carry, y), pull, (other_carry, other_y) = jax.vjp(
            of_floats, window[0], carry, slices, consts, has_aux=True
        )
        known = (window[0], slices, consts, other_slices, other_consts)
        stack.traced["pull"], saved = _Pull.of(pull, known)
        return (carry, other_carry, [*window[1:], ahead]), (y, other_y, saved)

    window = [stack.values(shards, i) for i in range(stack.prefetch)]
    (carry, other_carry, window), (ys, other_ys, saved) = lax.scan(
        body,
        (carry, other_carry, window),
        (jnp.arange(stack.num_units), slices, other_slices),
        unroll=stack.unroll,
    )
    return ((carry, ys), (other_carry, other_ys)), saved, window


def _backward(stack: _Stack, residuals, cotangents):
    """The cotangents of `(shards, floats, others)`."""
    shards, (saved, window), (slices, consts), (other_slices, other_consts) = residuals
    (carry, ys), _ = cotangents
    last = stack.num_units - 1

    def body(state, x):
        carry, window, pending, reduced, sinks, d_consts = state
        i, y, saved, slices, other_slices = x
        window, behind = stack.shift(shards, window, i - stack.prefetch)
        # As for the gathers: one unit's gradients after the other's, and not together.
        pending, reduced = lax.optimization_barrier((pending, reduced))
        # The first two have nothing to write yet, and write where the third one does.
        sinks = _put(sinks, reduced, jnp.minimum(i + 2, last))
        reduced = _reduced(stack, shards, pending, jnp.minimum(i + 1, last))
        known = (window[0], slices, consts, other_slices, other_consts)
        pull = stack.traced["pull"].rebuild(saved, known)
        pending, carry, d_slices, more = pull((carry, y))
        d_consts = jax.tree.map(jnp.add, d_consts, more)
        window = [*window[1:], behind]
        return (carry, window, pending, reduced, sinks, d_consts), d_slices

    zeros = [shard.sink for shard in shards]  # Of the shape of the gradients.
    start = (
        carry,
        window,
        jax.tree.map(jnp.zeros_like, window[0]),
        _at(zeros, 0),
        zeros,
        jax.tree.map(jnp.zeros_like, consts),
    )
    (carry, _, pending, reduced, sinks, d_consts), d_slices = lax.scan(
        body,
        start,
        (jnp.arange(stack.num_units), ys, saved, slices, other_slices),
        reverse=True,
        unroll=stack.unroll,
    )
    sinks = _put(sinks, reduced, min(1, last))
    sinks = _put(sinks, _reduced(stack, shards, pending, 0), 0)
    pairs = zip(shards, sinks, strict=True)
    d_shards = [_cotangent(shard, sink) for shard, sink in pairs]
    return d_shards, (carry, d_slices, d_consts), None


def _reduced(stack: _Stack, shards, grads: Leaves, i: Any) -> Leaves:
    """The gradients of the values of unit `i`, as they leave through its sinks."""
    own = _at(shards, i)

    def of_sinks(sinks):
        pairs = zip(own, sinks, strict=True)
        return stack.weights_only(
            [dataclasses.replace(shard, sink=sink) for shard, sink in pairs]
        )

    _, pull = jax.vjp(of_sinks, [shard.sink for shard in own])
    return pull(grads)[0]


@dataclasses.dataclass(frozen=True)
class _Pull:
    """A function from cotangents to cotangents, without what it need not keep.

    What `jax.vjp` saves is partly what it was given: weights, which are gathered again,
    slices and constants, which are there anyway.

    Attributes:
      treedef: Of the function.
      places: For each of its leaves, its place in what is known, or None.
    """

    treedef: Any
    places: tuple[int | None, ...]

    @classmethod
    def of(cls, pull: Any, known: PyTree) -> tuple[_Pull, Leaves]:
        """The form of `pull`, and the leaves that are not `known`."""
        leaves, treedef = jax.tree.flatten(pull)
        at = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves(known))}
        places = tuple(at.get(id(leaf)) for leaf in leaves)
        pairs = zip(leaves, places, strict=True)
        saved = [jnp.asarray(leaf) for leaf, place in pairs if place is None]
        return cls(treedef, places), saved

    def rebuild(self, saved: Leaves, known: PyTree) -> Any:
        given, have = iter(saved), jax.tree.leaves(known)
        return self.treedef.unflatten(
            next(given) if place is None else have[place] for place in self.places
        )


def _cotangent(shard: Shard, sink: Array | None) -> Shard:
    """Of a stack, all slices of whose gradient are in `sink` now."""
    value, row = None, shard.row
    if sink is None:
        value = marked_zeros(row, shard.value)
    else:
        sink = mark_gradient(sink, row.name, row.ndim_in_unit)
    return dataclasses.replace(shard, value=value, sink=sink, earlier=None)


def _unshard(shards: Sequence[Shard]) -> list[Array]:
    return [gather_weight(shard) for shard in shards]


def _first(leaf: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)


def _at(tree: PyTree, i: Any) -> PyTree:
    return jax.tree.map(
        lambda leaf: lax.dynamic_index_in_dim(leaf, i, 0, keepdims=False), tree
    )


def _put(stacked: PyTree, slices: PyTree, i: Any) -> PyTree:
    return jax.tree.map(
        lambda all_, one: lax.dynamic_update_index_in_dim(all_, one, i, 0),
        stacked,
        slices,
    )
