"""Units: functions whose weights are gathered at entry and freed at exit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from fsdp_jax._scopes import unit_scope
from fsdp_jax._tree import PyTree
from fsdp_jax.lora._composed_weight import take_parts
from fsdp_jax.step._collectives import gather_weight
from fsdp_jax.step._gathered import of_gathered
from fsdp_jax.step._object_graph import Outcome, object_pairs, take_apart
from fsdp_jax.step._remat import reshard_after_forward
from fsdp_jax.step._shard import Shard, partition


def unit(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a function as a unit: the weights in its first argument are gathered.

    Without shards in `weights` (outside of a plan, or already unsharded) the function
    is called as it is, so a marked function still runs on one device.

    Args:
      fn: Function `fn(weights, *args, **kwargs)`; `weights` is any pytree. It may close
        over arrays, return values that are not arrays, and write to the containers and
        modules among its arguments.

    Returns:
      `fn`, with the shards in `weights` gathered at entry. With `reshard_after_forward`
      backward gathers them again, and neither they nor values computed from them alone
      are saved.

    Examples:
      >>> @fsdp.unit
      ... def head(weights, x):
      ...     return x @ weights
      >>> def predict(model, batch):
      ...     x, _ = fsdp.scan(layer, model["layers"], batch["x"])
      ...     return head(model["head"], x)
      >>> units = [fsdp.Stacked("layers"), "head"]
      >>> plan = fsdp.fully_shard(make_model, mesh, units)
      >>> fsdp.make_forward(plan, predict)(params, batch).shape
      (8, 16)
    """

    @functools.wraps(fn)
    def entered(weights: PyTree, *args: Any, **kwargs: Any) -> Any:
        # Objects within that are units keep their shards and gather them when called;
        # not so `weights` itself, whose call is what runs here.
        shards, others, merge = partition(
            weights, keep=lambda node: is_unit(node) and node is not weights
        )
        if not shards:
            return fn(weights, *args, **kwargs)

        def compute(unsharded, others, args, kwargs):
            own = merge(unsharded, others)
            pairs = object_pairs(weights, own)
            return Outcome(fn(own, *args, **kwargs), pairs)

        return call_unit(compute, shards, others, args, kwargs)

    return entered


class UnitObject:
    """Base of objects in a model whose `__call__` gathers their weights itself."""


def is_unit(node: Any) -> bool:
    """Returns whether `node` gathers its own weights when it is called."""
    return isinstance(node, UnitObject)


def call_unit(
    compute: Callable[..., Any], shards: Sequence[Shard], *args: PyTree
) -> Any:
    """Calls `compute(weights, *args)` with the unsharded weights of `shards`.

    Args:
      compute: Function of `weights` and `args`. Its writes to lists, dicts, modules and
        dataclasses among them are repeated on the caller's objects. It returns its
        result, or an `Outcome` if it writes to objects that are not in `args`.
      shards: Parameters of the unit, without stacked dims; at least one.
      *args: Pytrees; leaves that are not JAX arrays reach `compute` unchanged.

    Returns:
      The result of `compute`; leaves that are not arrays, such as strings, included.
    """
    leaves, treedef = jax.tree.flatten(args)
    # numpy arrays are not traced, as without a unit: they may be sizes or indices.
    traced = [isinstance(leaf, jax.Array) for leaf in leaves]
    arrays = [leaf for leaf, is_array in zip(leaves, traced, strict=True) if is_array]
    rebuilds: list[Callable[..., Any]] = []

    def on_arrays(weights, arrays):
        given = iter(arrays)
        merged = treedef.unflatten(
            next(given) if is_array else leaf
            for leaf, is_array in zip(leaves, traced, strict=True)
        )
        pairs = object_pairs(args, merged)
        out = compute(weights, *merged)
        if isinstance(out, Outcome):
            out, pairs = out.value, [*pairs, *out.pairs]
        results, rebuild = take_apart(Outcome(out, pairs))
        rebuilds.append(rebuild)
        return results

    results = _gathered(on_arrays, shards, arrays)
    # `on_arrays` runs under a trace; its last run is the one that made `results`.
    return rebuilds[-1](results)


def _gathered(
    compute: Callable[..., list[jax.Array]],
    shards: Sequence[Shard],
    arrays: Sequence[jax.Array],
) -> list[jax.Array]:
    """Gathers the weights of `shards`, and runs `compute(weights, arrays)` on them."""

    def unshard(shards):
        return [gather_weight(shard) for shard in shards]

    of_weights, parts, keys = take_parts(compute, shards)
    of_parts, param = of_gathered(of_weights), parts[0].param
    with unit_scope(param.unit):
        if not param.unit_policy.reshard:
            return of_parts(unshard(parts), keys, arrays)
        resharding = reshard_after_forward(
            of_parts, unshard, param.unit_policy.remat_policy
        )
        return resharding(parts, keys, arrays)
