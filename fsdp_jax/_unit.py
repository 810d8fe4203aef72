"""A unit: what is gathered once at entry, used, and let go."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from fsdp_jax._collectives import gather_weight
from fsdp_jax._derived import take_parts
from fsdp_jax._reshard import reshard_after_forward
from fsdp_jax._shard import Shard, partition
from fsdp_jax._tree import PyTree


def unit(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a function as a unit: its first argument's weights are whole inside only.

    Outside of a plan, or where the weights are already whole, the function is called as
    it is, so a marked function still runs on one device.

    Args:
      fn: `fn(weights, *args, **kwargs)`; weights are any pytree. What it is
        differentiated by has to enter through its arguments.

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

        def compute(whole, others, args, kwargs):
            return fn(merge(whole, others), *args, **kwargs)

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
      compute: A pure function whose result is a pytree of arrays.
      shards: The unit's own parameters, slices of stacked ones.
      *args: Pytrees; leaves that are no arrays reach `compute` as they are.
    """
    if not shards:
        return compute([], *args)
    leaves, treedef = jax.tree.flatten(args)
    traced = [isinstance(leaf, (jax.Array, np.ndarray)) for leaf in leaves]
    arrays = [leaf for leaf, is_array in zip(leaves, traced, strict=True) if is_array]

    def on_arrays(weights, arrays):
        given = iter(arrays)
        merged = [
            next(given) if is_array else leaf
            for leaf, is_array in zip(leaves, traced, strict=True)
        ]
        return compute(weights, *treedef.unflatten(merged))

    def unshard(shards):
        return [gather_weight(shard) for shard in shards]

    of_parts, parts, keys = take_parts(on_arrays, shards)
    row = parts[0].row
    with jax.named_scope(f"unit:{row.unit}"):
        if not row.reshard:
            return of_parts(unshard(parts), keys, arrays)
        resharding = reshard_after_forward(of_parts, unshard, row.remat_policy)
        return resharding(parts, keys, arrays)
