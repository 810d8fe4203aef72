"""Objects as units: their methods gather the weights, in unmodified models."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
from flax import nnx

from fsdp_jax.sharding._unit_methods import (
    Methods,
    UnitClasses,
    methods_of,
    subclasses,
)
from fsdp_jax.step._object_graph import Outcome, object_pairs
from fsdp_jax.step._shard import is_shard, partition, shards_of
from fsdp_jax.step._unit import UnitObject, call_unit, is_unit, unit


def mark_objects(model: Any, classes: UnitClasses) -> Any:
    """Makes every object of `classes` in `model` a unit.

    Args:
      model: nnx module, changed in place (pass a copy), or pytree that contains
        objects such as equinox modules.
      classes: Classes whose objects are units, and the methods that enter them;
        subclasses count.

    Returns:
      The model.
    """
    if not classes:
        return model
    if isinstance(model, nnx.Module):
        for _, module in list(nnx.iter_modules(model)):
            if isinstance(module, tuple(classes)) and not is_unit(module):
                chosen = _chosen(module, classes)
                module.__class__ = _unit_class(type(module), chosen)
        return model
    return _mark_pytree(model, classes)


def unmark_objects(tree: Any) -> Any:
    """Restores the user's objects in a pytree, or part of one, of `mark_objects`."""

    def unmark(node):
        return unmark_objects(node._obj) if type(node) is _Proxy else node

    return jax.tree.map(unmark, tree, is_leaf=lambda n: type(n) is _Proxy)


@contextmanager
def gather_unbound(classes: UnitClasses) -> Iterator[None]:
    """Context in which methods gather that are taken from a class, not an object.

    A model may call `nnx.remat(Block.__call__)(block, x)`, which passes by what
    `mark_objects` makes of the block. Within the context the class has methods that
    gather the weights of marked objects, and do for others what they did before.
    """
    replaced: list[tuple[type, str, Any]] = []
    try:
        for cls, chosen in classes.items():
            users = [c for c in subclasses(cls) if not issubclass(c, UnitObject)]
            for one in (cls, *users):
                for name, method in methods_of(one, chosen).items():
                    owner = next(c for c in one.__mro__ if name in vars(c))
                    replaced.append((owner, name, vars(owner)[name]))
                    setattr(owner, name, _gathering(method))
        yield
    finally:
        for owner, name, method in reversed(replaced):
            setattr(owner, name, method)


def _chosen(obj: Any, classes: UnitClasses) -> Methods:
    """Returns the methods that enter an object; None for all."""
    found = [chosen for cls, chosen in classes.items() if isinstance(obj, cls)]
    named = [chosen for chosen in found if chosen is not None]
    return frozenset().union(*named) if len(named) == len(found) else None


def _gathering(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a method such that a marked object's weights are gathered before."""
    plain = getattr(method, "_without_gather", method)

    def gathering(self, *args, **kwargs):
        if type(self) is _Proxy:
            return unit(plain)(self._obj, *args, **kwargs)
        if isinstance(self, nnx.Module) and is_unit(self):
            return _call_module(plain, self, args, kwargs)
        return plain(self, *args, **kwargs)

    wrapped: Any = functools.wraps(plain)(gathering)
    # Not `__wrapped__`, which decorators of the user's set too.
    wrapped._without_gather = plain
    return wrapped


@functools.cache
def _unit_class(cls: type, chosen: Methods) -> type:
    """Makes the subclass of an nnx module class whose methods gather first.

    With a subclass the user's class is not patched, and an nnx transform that splits an
    object and merges it again keeps the type.

    Source: FSDP2 `fully_shard.py`, which swaps the class of a module in the same way.
    """
    namespace = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }
    methods = methods_of(cls, chosen).items()
    namespace |= {name: _gathering(method) for name, method in methods}
    return type(cls)(cls.__name__, (cls, UnitObject), namespace)


def _call_module(
    method: Callable[..., Any], module: nnx.Module, args: tuple, kwargs: dict
) -> Any:
    if not shards_of(nnx.state(module)):
        return method(module, *args, **kwargs)
    everything = (module, args, kwargs)
    # Arguments are split together with the module, since they may share Variables.
    graphdef, weights, rest = nnx.split(everything, _own_shards(module), ...)
    shards, _, merge = partition(weights)
    if not shards:  # All its shards belong to units within it.
        return method(module, *args, **kwargs)
    # Flattened, since the Variables of an nnx State are the caller's own objects.
    leaves, treedef = jax.tree.flatten(rest, is_leaf=is_shard)

    def compute(unsharded, leaves):
        rest = treedef.unflatten(leaves)
        objects = nnx.merge(graphdef, merge(unsharded, []), rest)
        # The call writes dropout counters, BatchNorm statistics and attributes to the
        # copy in `objects`; `pairs` carries these writes out of the trace.
        pairs = object_pairs(everything, objects)
        out = method(objects[0], *objects[1], **objects[2])
        return Outcome(out, pairs)

    return call_unit(compute, shards, leaves)


def written_state(tree: Any) -> Any:
    """Returns the writable state of nnx modules in `tree`: Variables but parameters."""
    return nnx.state(tree, _is_written) if _has_modules(tree) else ()


def values_of(state: Any) -> dict[Any, list[Any]]:
    """Returns the arrays of a `written_state` by path, before a call may write it."""
    return {path: jax.tree.leaves(leaf) for path, leaf in _flat(state)}


def changed_since(before: dict[Any, list[Any]], state: Any) -> Any:
    """Returns the part of a `written_state` that holds other arrays than before.

    A table that a layer only reads stays out of it: flax lets no transformation write
    to a module that it closes over, whatever the value.
    """

    def is_same(path, leaf):
        old, new = before.get(path, ()), jax.tree.leaves(leaf)
        return len(old) == len(new) and all(map(operator.is_, old, new))

    flat = [(path, leaf) for path, leaf in _flat(state) if not is_same(path, leaf)]
    return nnx.from_flat_state(flat) if flat else ()


def _flat(state: Any) -> list[tuple[Any, Any]]:
    return list(nnx.to_flat_state(state)) if jax.tree.leaves(state) else []


def put_state(tree: Any, written: Any) -> None:
    """Updates `tree` with the part of its state that a copy of it wrote."""
    if jax.tree.leaves(written):
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
class _Proxy(UnitObject):
    """A proxy of a pytree object whose methods gather its weights.

    Attributes, static fields included, and the class are those of the object, so that
    the model can use the proxy like the object itself.
    """

    def __init__(self, obj: Any, chosen: Methods = None):
        self._obj = obj
        self._chosen = chosen

    def __call__(self, *args, **kwargs):
        method = type(self._obj).__call__
        if self._chosen is None or "__call__" in self._chosen:
            return _gathering(method)(self, *args, **kwargs)
        return self._obj(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in ("_obj", "_chosen"):  # Not set yet: a lookup would recurse.
            raise AttributeError(name)
        method = methods_of(type(self._obj), self._chosen).get(name)
        if method is None or name in getattr(self._obj, "__dict__", ()):
            return getattr(self._obj, name)
        # A pytree, as the bound methods of equinox are.
        return jax.tree_util.Partial(_gathering(method), self)

    @property
    def __class__(self):  # pyright: ignore[reportIncompatibleMethodOverride]
        """The class of the object, so that `isinstance` in the model is unaffected."""
        return type(self._obj)

    def tree_flatten_with_keys(self):
        return ((jax.tree_util.GetAttrKey("_obj"), self._obj),), self._chosen

    @classmethod
    def tree_unflatten(cls, chosen, children):
        (obj,) = children
        return cls(obj, chosen)


def _mark_pytree(model: Any, classes: UnitClasses) -> Any:
    is_of_class = tuple(classes)

    def mark(node):
        if not isinstance(node, is_of_class):
            return node
        inside = jax.tree.map(
            mark, node, is_leaf=lambda n: isinstance(n, is_of_class) and n is not node
        )
        return _Proxy(inside, _chosen(node, classes))

    return jax.tree.map(mark, model, is_leaf=lambda n: isinstance(n, is_of_class))
