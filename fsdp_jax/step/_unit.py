"""A unit: what is gathered once at entry, used, and let go."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from fsdp_jax._tree import PyTree
from fsdp_jax.lora._composed_weight import take_parts
from fsdp_jax.step._collectives import gather_weight
from fsdp_jax.step._object_graph import Outcome, take_apart, twins_of
from fsdp_jax.step._remat import reshard_after_forward
from fsdp_jax.step._shard import Shard, partition


def unit(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a function as a unit: its first argument's weights are whole inside only.

    Outside of a plan, or where the weights are already whole, the function is called as
    it is, so a marked function still runs on one device.

    Args:
      fn: `fn(weights, *args, **kwargs)`; weights are any pytree. It may close over
        arrays, return what is no array, and write into the containers and modules that
        it is given.

    Returns:
      The function, gathering the shards in `weights` at entry; with
      `reshard_after_forward` it gathers them again for backward instead of keeping
      them, or anything made from them alone.
    """

    @functools.wraps(fn)
    def entered(weights: PyTree, *args: Any, **kwargs: Any) -> Any:
        shards, others, merge = partition(
            weights, keep=lambda node: is_unit(node) and node is not weights
        )
        if not shards:
            return fn(weights, *args, **kwargs)

        def compute(whole, others, args, kwargs):
            own = merge(whole, others)
            twins = twins_of(weights, own)
            return Outcome(fn(own, *args, **kwargs), twins)

        return call_unit(compute, shards, others, args, kwargs)

    return entered


class UnitObject:
    """Base of objects in a model whose `__call__` gathers their weights itself."""


def is_unit(node: Any) -> bool:
    """Whether `node` gathers its own weights when it is called."""
    return isinstance(node, UnitObject)


def call_unit(
    compute: Callable[..., Any], shards: Sequence[Shard], *args: PyTree
) -> Any:
    """Calls `compute(weights, *args)` with the whole weights of `shards`.

    Args:
      compute: A function of its arguments. What it writes into lists, dicts, modules
        and dataclasses among them is written to the caller's. It returns the result,
        or an `Outcome` if it was given other objects besides.
      shards: The unit's own parameters, slices of stacked ones; at least one.
      *args: Pytrees; leaves that are no JAX arrays reach `compute` as they are.

    Returns:
      The result; what is no array in it, such as a string, is returned as it is.
    """
    leaves, treedef = jax.tree.flatten(args)
    # numpy's stay numpy's, as in the plain program: they may be sizes or indices.
    traced = [isinstance(leaf, jax.Array) for leaf in leaves]
    arrays = [leaf for leaf, is_array in zip(leaves, traced, strict=True) if is_array]
    rebuilds: list[Callable[..., Any]] = []

    def on_arrays(weights, arrays):
        given = iter(arrays)
        merged = treedef.unflatten(
            next(given) if is_array else leaf
            for leaf, is_array in zip(leaves, traced, strict=True)
        )
        twins = twins_of(args, merged)
        out = compute(weights, *merged)
        if isinstance(out, Outcome):
            out, twins = out.value, [*twins, *out.twins]
        results, rebuild = take_apart(Outcome(out, twins))
        rebuilds.append(rebuild)
        return results

    results = _gathered(on_arrays, shards, arrays)
    return rebuilds[-1](results)


def _gathered(
    compute: Callable[..., list[jax.Array]],
    shards: Sequence[Shard],
    arrays: Sequence[jax.Array],
) -> list[jax.Array]:
    """`compute(weights, arrays)`, whose weights are gathered here."""

    def unshard(shards):
        return [gather_weight(shard) for shard in shards]

    of_parts, parts, keys = take_parts(compute, shards)
    row = parts[0].row
    with jax.named_scope(f"unit:{row.unit}"):
        if not row.reshard:
            return of_parts(unshard(parts), keys, arrays)
        resharding = reshard_after_forward(of_parts, unshard, row.remat_policy)
        return resharding(parts, keys, arrays)
