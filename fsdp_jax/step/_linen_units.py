"""Units of linen modules: submodules whose parameters lie under a unit's path."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
from flax import linen as nn
from flax.core import lift
from flax.errors import ScopeParamShapeError

# How `nn.remat` itself enters a method: it carries variables, keys and modules in
# arguments across. Not exported by flax, unchanged since 0.3, tried on 0.12.8.
from flax.linen.transforms import lift_direct_transform

from fsdp_jax._tree import PyTree, named_leaves
from fsdp_jax.lora._composed_weight import Derived
from fsdp_jax.step._shard import is_shard, partition, shards_of
from fsdp_jax.step._unit import call_unit


@contextmanager
def gather_at_units() -> Iterator[None]:
    """While open, a linen module of a unit gathers its weights when a method is called.

    A module is that of a unit if its parameters are named, behind the unit's path, as
    they are within the module. So it does not matter which tree the variables come
    from: `{"params": ...}`, the parameters alone, or a tree with several modules.

    Raises:
      ValueError: If a module reads a weight of a unit that was not entered.
    """

    def intercept(next_fun, args, kwargs, context: nn.module.InterceptorContext):
        module = context.module
        if not module.scope or not _is_top_of_unit(module.variables):
            return next_fun(*args, **kwargs)
        if context.method_name == "setup":
            # The unit runs it too, where the weights that it reads are whole.
            has_own = _has_own_shards(module.variables)
            return None if has_own else next_fun(*args, **kwargs)
        # The method of the class, which flax has bound to the module.
        method: Any = context.orig_method
        return _call(method.func, module, args, kwargs)

    # What a model says about axes of a mesh is for XLA to follow, and no constraint
    # may name an axis over which the step is written device by device.
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
    """Boxes of linen's parameters as those that ask for no sharding.

    Args:
      tree: Any pytree; of `nn.Partitioned` boxes the names of dims stay.
    """

    def is_box(node):
        return isinstance(node, nn.Partitioned)

    def inert(node):
        if not is_box(node):
            return node
        # Of this class, a box is unboxed by `nn.logical_axis_rules`, of which are none.
        return nn.LogicallyPartitioned(node.value, node.names)

    return jax.tree.map(inert, tree, is_leaf=lambda n: is_box(n) or is_shard(n))


def _is_top_of_unit(variables: PyTree) -> bool:
    """Whether a module with these variables is the outermost one of its unit.

    The name of a weight is the unit's path and what the module calls it. A scan is
    entered where it has sliced its stack: its wrapper, of the same name, is none.
    """
    for name, leaf in named_leaves(variables, is_shard):
        if is_shard(leaf) and leaf.is_slice:
            collection, _, inside = _without_box(name).partition(".")
            whole = leaf.recipe.name if isinstance(leaf, Derived) else leaf.row.name
            rest = _without_box(whole).removeprefix(f"{leaf.row.unit}.")
            if rest in (inside, f"{collection}.{inside}"):
                return True
    return False


def _without_box(name: str) -> str:
    """The name of a variable, not of what lies in its `nn.Partitioned` box."""
    return name.removesuffix(".value")


def _has_own_shards(variables: PyTree) -> bool:
    """Whether the module has weights itself, and not in modules within it."""
    named = named_leaves(variables, is_shard)
    return any(is_shard(x) and _without_box(n).count(".") == 1 for n, x in named)


def _call(
    method: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict
) -> Any:
    """Calls a method as a pure function of the unit's weights and everything else.

    What the model may write (a collection that is mutable, there before or not) comes
    out and is written.
    """

    @functools.wraps(method)
    def body(module, *args, **kwargs):
        return method(module, *args, **kwargs)

    # By its own name flax would capture its result twice (`capture_intermediates`).
    body.__name__ = f"gathered_{method.__name__}"
    return lift_direct_transform(_gathered, (body,), module, *args, **kwargs)


def _gathered(fn: Callable[..., Any], scopes: Any, *args: Any, **kwargs: Any) -> Any:
    """`fn(scopes, *args, **kwargs)` of flax's core, in a unit."""

    def inner(scope_fn, repack_fn, variables, rngs, *args, **kwargs):
        shards, others, merge = partition(variables)

        def compute(whole, others, rngs, args, kwargs):
            scopes = scope_fn(merge(whole, others), rngs)
            out = fn(scopes, *args, **kwargs)
            return out, repack_fn(scopes)

        return call_unit(compute, shards, others, rngs, args, kwargs)

    # Never the weights, should even these be mutable: they are whole within only.
    held = {
        collection
        for scope in scopes
        for collection, tree in scope.variables().items()
        if shards_of(tree)
    }
    written = nn.DenyList(tuple(sorted(held)))
    run = lift.pack(inner, (True,), (written,), (True,), "unit", enable_kwargs=True)
    return run(scopes, *args, **kwargs)
