"""Linen modules as units: submodules whose parameters are under a unit's path."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
from flax import linen as nn
from flax.core import lift
from flax.errors import ScopeParamShapeError

from fsdp_jax._compat import LIFT_TRANSFORM
from fsdp_jax._tree import PyTree, named_leaves
from fsdp_jax.lora._composed_weight import Derived
from fsdp_jax.step._shard import is_shard, partition, shards_of
from fsdp_jax.step._unit import call_unit


@contextmanager
def gather_at_units() -> Iterator[None]:
    """Context in which linen modules that are units gather when a method is called.

    A module is that of a unit if its parameters have, after the unit's path, the names
    that they have within the module. So it does not matter which tree the variables
    come from: `{"params": ...}`, the parameters alone, or a tree with several modules.

    Raises:
      ValueError: If a module reads a weight of a unit that is not running.
    """

    def intercept(next_fun, args, kwargs, context: nn.module.InterceptorContext):
        module = context.module
        if not module.scope or not _is_top_of_unit(module.variables):
            return next_fun(*args, **kwargs)
        if context.method_name == "setup":
            # The unit runs `setup` again, where the weights that it reads are gathered.
            has_own = _has_own_shards(module.variables)
            return None if has_own else next_fun(*args, **kwargs)
        # `orig_method` is a partial of the class's method and the module.
        method: Any = context.orig_method
        return _call(method.func, module, args, kwargs)

    # A model's logical axis rules are for automatic sharding: within `shard_map` no
    # sharding constraint may name a manual axis.
    with nn.intercept_methods(intercept), nn.logical_axis_rules(()):
        try:
            yield
        except ScopeParamShapeError as error:
            said = str(error).partition(" (https:")[0]
            raise ValueError(
                "A linen module reads a weight that belongs to a unit outside of it, "
                f"where only this device's shard exists: {said} Call the module that "
                "lies at the unit's path, or leave the weight out of `units`."
            ) from error


def without_constraints(tree: PyTree) -> PyTree:
    """Replaces `nn.Partitioned` boxes with boxes that apply no sharding constraint.

    Args:
      tree: Any pytree. The names of dims in its boxes are kept.

    Returns:
      The tree, with `nn.LogicallyPartitioned` boxes.
    """

    def is_box(node):
        return isinstance(node, nn.Partitioned)

    def inert(node):
        if not is_box(node):
            return node
        # Unboxing this class follows `nn.logical_axis_rules`, which are empty here.
        return nn.LogicallyPartitioned(node.value, node.names)

    return jax.tree.map(inert, tree, is_leaf=lambda n: is_box(n) or is_shard(n))


def _is_top_of_unit(variables: PyTree) -> bool:
    """Returns whether a module with these variables is the outermost one of its unit.

    It is if the name of a weight is the unit's path followed by its name in the module.
    The wrapper of a scan has the same names but is not a unit: its shards are stacks,
    and the unit is the module within, whose shards are slices.
    """
    for name, leaf in named_leaves(variables, is_shard):
        if is_shard(leaf) and leaf.is_slice:
            collection, _, inside = _without_box(name).partition(".")
            name = leaf.recipe.name if isinstance(leaf, Derived) else leaf.param.name
            rest = _without_box(name).removeprefix(f"{leaf.param.unit}.")
            if rest in (inside, f"{collection}.{inside}"):
                return True
    return False


def _without_box(name: str) -> str:
    """Returns a variable's name, without the suffix of its `nn.Partitioned` box."""
    return name.removesuffix(".value")


def _has_own_shards(variables: PyTree) -> bool:
    """Returns whether the module itself has weights, and not only its submodules."""
    named = named_leaves(variables, is_shard)
    return any(is_shard(x) and _without_box(n).count(".") == 1 for n, x in named)


def _call(
    method: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict
) -> Any:
    """Calls a method as a pure function of the unit's weights and everything else.

    Mutable collections, existing or new, are results of that function, and are written
    back to the module.
    """

    @functools.wraps(method)
    def body(module, *args, **kwargs):
        return method(module, *args, **kwargs)

    # Under its own name `capture_intermediates` would record the result twice.
    body.__name__ = f"gathered_{method.__name__}"
    lifted = LIFT_TRANSFORM.get()
    return lifted(_gathered, (body,), module, *args, **kwargs)


def _gathered(fn: Callable[..., Any], scopes: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs a function of flax scopes, `fn(scopes, *args, **kwargs)`, in a unit."""

    def inner(scope_fn, repack_fn, variables, rngs, *args, **kwargs):
        shards, others, merge = partition(variables)

        def compute(unsharded, others, rngs, args, kwargs):
            scopes = scope_fn(merge(unsharded, others), rngs)
            out = fn(scopes, *args, **kwargs)
            return out, repack_fn(scopes)

        return call_unit(compute, shards, others, rngs, args, kwargs)

    # Weights are never written back, even if their collection is mutable: inside the
    # unit they are unsharded, outside they are shards.
    held = {
        collection
        for scope in scopes
        for collection, tree in scope.variables().items()
        if shards_of(tree)
    }
    written = nn.DenyList(tuple(sorted(held)))
    # All collections go in, all but those with shards come out, all rngs go in.
    run = lift.pack(inner, (True,), (written,), (True,), "unit", enable_kwargs=True)
    return run(scopes, *args, **kwargs)
