"""Objects as units: the `__call__` of a class, in unmodified models."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import jax
from flax import nnx

from fsdp_jax.step._object_graph import Outcome, twins_of
from fsdp_jax.step._shard import is_shard, partition, shards_of
from fsdp_jax.step._unit import UnitObject, call_unit, is_unit, unit


def mark_objects(model: Any, classes: tuple[type, ...]) -> Any:
    """Makes every object of `classes` in `model` a unit.

    Args:
      model: nnx module, changed in place (pass a copy), or pytree that contains
        objects such as equinox modules.
      classes: Classes whose `__call__` is a unit; subclasses count.

    Returns:
      The model.
    """
    if not classes:
        return model
    if isinstance(model, nnx.Module):
        for _, module in list(nnx.iter_modules(model)):
            if isinstance(module, classes) and not is_unit(module):
                module.__class__ = _unit_class(type(module))
        return model
    return _mark_pytree(model, classes)


def unmark_objects(tree: Any) -> Any:
    """Restores the user's objects in a pytree, or part of one, of `mark_objects`."""

    def unmark(node):
        return unmark_objects(node._obj) if type(node) is _CallableUnit else node

    return jax.tree.map(unmark, tree, is_leaf=lambda n: type(n) is _CallableUnit)


@functools.cache
def _unit_class(cls: type) -> type:
    """Makes the subclass of an nnx module class whose `__call__` gathers first.

    With a subclass the user's class is not patched, and an nnx transform that splits an
    object and merges it again keeps the type.

    Source: FSDP2 `fully_shard.py`, which swaps the class of a module in the same way.
    """

    def __call__(self, *args, **kwargs):
        return _call_module(cls, self, args, kwargs)

    namespace = {
        "__call__": __call__,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }
    return type(cls)(cls.__name__, (cls, UnitObject), namespace)


def _call_module(cls: type, module: nnx.Module, args: tuple, kwargs: dict) -> Any:
    if not shards_of(nnx.state(module)):
        return cls.__call__(module, *args, **kwargs)
    everything = (module, args, kwargs)
    # Arguments are split together with the module, since they may share Variables.
    graphdef, weights, rest = nnx.split(everything, _own_shards(module), ...)
    shards, _, merge = partition(weights)
    if not shards:  # All its shards belong to units within it.
        return cls.__call__(module, *args, **kwargs)
    # Flattened, since the Variables of an nnx State are the caller's own objects.
    leaves, treedef = jax.tree.flatten(rest, is_leaf=is_shard)

    def compute(whole, leaves):
        rest = treedef.unflatten(leaves)
        objects = nnx.merge(graphdef, merge(whole, []), rest)
        # The call writes dropout counters, BatchNorm statistics and attributes to the
        # copy in `objects`; `twins` carries these writes out of the trace.
        twins = twins_of(everything, objects)
        out = cls.__call__(objects[0], *objects[1], **objects[2])
        return Outcome(out, twins)

    return call_unit(compute, shards, leaves)


def written_state(tree: Any) -> Any:
    """Returns the writable state of nnx modules in `tree`: Variables but parameters."""
    return nnx.state(tree, _is_written) if _has_modules(tree) else ()


def put_state(tree: Any, written: Any) -> None:
    """Updates `tree` with the `written_state` of a copy of it."""
    if _has_modules(tree):
        nnx.update(tree, written)


def _has_modules(tree: Any) -> bool:
    def is_module(node):
        return isinstance(node, nnx.Module)

    return any(map(is_module, jax.tree.leaves(tree, is_leaf=is_module)))


def _is_written(path: Any, leaf: Any) -> bool:
    return isinstance(leaf, nnx.Variable) and not isinstance(leaf, nnx.Param)


def _own_shards(module: nnx.Module):
    """Makes a filter for the shards of `module`, without those of units inside it."""
    # Paths are in `(module, args, kwargs)`, where the module is item 0.
    nested = [
        (0, *path)
        for path, inner in nnx.iter_modules(module)
        if is_unit(inner) and inner is not module
    ]

    def own(path: Iterable[Any], leaf: Any) -> bool:
        path = tuple(path)
        inside = any(path[: len(prefix)] == prefix for prefix in nested)
        return path[0] == 0 and not inside and bool(shards_of(leaf))

    return own


@jax.tree_util.register_pytree_with_keys_class
class _CallableUnit(UnitObject):
    """A proxy of a callable pytree object that gathers its weights when called.

    Attributes, static fields included, and the class are those of the object, so that
    the model can use the proxy like the object itself.
    """

    def __init__(self, obj: Any):
        self._obj = obj

    def __call__(self, *args, **kwargs):
        call = unit(lambda obj, *args, **kwargs: obj(*args, **kwargs))
        return call(self._obj, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "_obj":  # Not set yet: a lookup would recurse.
            raise AttributeError(name)
        return getattr(self._obj, name)

    @property
    def __class__(self):  # pyright: ignore[reportIncompatibleMethodOverride]
        """The class of the object, so that `isinstance` in the model is unaffected."""
        return type(self._obj)

    def tree_flatten_with_keys(self):
        return ((jax.tree_util.GetAttrKey("_obj"), self._obj),), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def _mark_pytree(model: Any, classes: tuple[type, ...]) -> Any:
    def mark(node):
        if not isinstance(node, classes):
            return node
        inside = jax.tree.map(
            mark, node, is_leaf=lambda n: isinstance(n, classes) and n is not node
        )
        return _CallableUnit(inside)

    return jax.tree.map(mark, model, is_leaf=lambda node: isinstance(node, classes))
