"""Carries results and writes of a traced function out of its trace, as arrays.

A unit is traced as a function from arrays to arrays, so that its backward can gather
the weights again. A user's function does more: it returns strings and dataclasses
beside arrays, sets attributes of its module, and appends to a list that it was given.
Results and writes become a list of arrays, which the trace returns, and a `rebuild`
function, which takes these arrays outside of the trace, makes the result of them and
repeats the writes on the caller's objects.

For `def __call__(self, x): y = x @ self.w; cache.append(y); return y, "done"`:

    trace is given      `cache'`, a copy of the caller's list `cache`
    twin                outer=`cache`, inner=`cache'`, before={}
    after the call      `cache'` is [y]: slot 0 was written
    arrays              [y of the result, y of slot 0]
    rebuild(arrays)     returns (arrays[0], "done"), and appends arrays[1] to `cache`

An object that is reached twice has one `ObjectPair`, found by its id, so that shared
and cyclic references survive: a returned object that was an argument is the caller's
object again.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer

from fsdp_jax._compat import NNX_STATE_PREFIX
from fsdp_jax.step._shard import is_shard

Rebuild = Callable[[Iterator[jax.Array]], Any]
"""`rebuild(arrays) -> value`: takes as many arrays off the iterator as it needs."""

Slots = dict[Hashable, Any]
"""The writable parts of an object: attributes, items, or a Variable's value."""


@dataclasses.dataclass(frozen=True)
class ObjectPair:
    """An object outside of a trace, and the copy of it that the trace is given.

    Attributes:
      outer: The caller's object.
      inner: Copy of `outer` in the trace; `outer` itself where it is not a pytree.
      before: Slots of `inner` before the function ran.
    """

    outer: Any
    inner: Any
    before: Slots

    def changes(self) -> tuple[Slots, list[Hashable]]:
        """Returns the slots that were written, and the keys of deleted ones."""
        after = _slots(self.inner) or {}
        missing = object()  # None is a value that a slot may have.
        written = {
            k: v for k, v in after.items() if self.before.get(k, missing) is not v
        }
        return written, [key for key in self.before if key not in after]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The return value of a function, and the pairs that it may have written to."""

    value: Any
    pairs: Sequence[ObjectPair]


def object_pairs(outer: Any, inner: Any) -> list[ObjectPair]:
    """Pairs each mutable object in a tree with its copy in another.

    Args:
      outer: Tree of containers, nnx modules, dataclasses and arrays.
      inner: Copy of `outer`, of the same structure.
    """
    found: dict[int, ObjectPair] = {}
    _pair(outer, inner, found)
    return list(found.values())


def _pair(outer: Any, inner: Any, found: dict[int, ObjectPair]) -> None:
    # An object that both sides share is static, except for records, which jax takes for
    # leaves, and the lists and dicts in them: a function may write to these.
    if id(inner) in found or (outer is inner and not _is_open(inner)):
        return
    slots = _slots(inner)
    if slots is None:
        for pair in zip(_children(outer), _children(inner), strict=True):
            _pair(*pair, found)
        return
    # Before the children, for which this object may be reached again through a cycle.
    found[id(inner)] = ObjectPair(outer, inner, slots)
    given = _slots(outer) or {}
    for key, value in slots.items():
        if key in given:
            _pair(given[key], value, found)


def take_apart(outcome: Outcome) -> tuple[list[jax.Array], Callable[..., Any]]:
    """Splits an outcome into arrays and a function that rebuilds it from them.

    Returns:
      The arrays that were returned or written; and `rebuild(arrays) -> value`, which
      also repeats on the outer objects what the function wrote to their copies.

    Raises:
      ValueError: If a value that holds traced arrays is not a pytree.
    """
    known = {id(pair.inner): pair.outer for pair in outcome.pairs}
    arrays, value = _flatten(outcome.value, known)
    writes = []
    for pair in outcome.pairs:
        written, deleted = pair.changes()
        made = {}
        for key, new in written.items():
            own, made[key] = _flatten(new, known)
            arrays += own
        if written or deleted:
            writes.append((pair.outer, made, deleted))

    def rebuild(arrays: Iterable[jax.Array]) -> Any:
        given = iter(arrays)
        result = value(given)
        for outer, made, deleted in writes:
            _write(outer, {key: make(given) for key, make in made.items()}, deleted)
        return result

    return arrays, rebuild


def _flatten(value: Any, known: dict[int, Any]) -> tuple[list[jax.Array], Rebuild]:
    if id(value) in known:  # A copy of the caller's object: return that object.
        return [], lambda _: known[id(value)]
    if isinstance(value, jax.Array):
        return [value], next
    if isinstance(value, nnx.Variable):
        arrays, make = _flatten(value.get_raw_value(), known)
        return arrays, lambda given: value.copy(make(given))
    if isinstance(value, nnx.Pytree):
        return _flatten_module(value, known)
    if _is_record(value):
        return _flatten_record(value, known)
    # One level at a time, since a child may be a known copy, a Variable or a record.
    children, treedef = jax.tree.flatten(value, is_leaf=lambda n: n is not value)
    if jax.tree_util.treedef_is_leaf(treedef):
        _check_static(value)
        return [], lambda _: value
    return _flatten_all(children, known, treedef.unflatten)


def _flatten_all(
    values: Sequence[Any], known: dict[int, Any], put_together: Callable[..., Any]
) -> tuple[list[jax.Array], Rebuild]:
    parts = [_flatten(value, known) for value in values]
    arrays = list(itertools.chain.from_iterable(own for own, _ in parts))
    return arrays, lambda given: put_together([make(given) for _, make in parts])


def _flatten_module(
    module: nnx.Pytree, known: dict[int, Any]
) -> tuple[list[jax.Array], Rebuild]:
    """Flattens a module that the function itself made."""
    if any(id(pair.inner) in known for pair in object_pairs(module, copy.copy(module))):
        raise ValueError(
            f"A unit's __call__ made a {type(module).__name__} that holds a module or "
            "Variable of the unit, and returned or kept it. Make it in __init__."
        )
    graphdef, state = nnx.split(module)
    leaves, treedef = jax.tree.flatten(state)

    def put_together(leaves):
        return nnx.merge(graphdef, treedef.unflatten(leaves))

    return _flatten_all(leaves, known, put_together)


def _flatten_record(
    record: Any, known: dict[int, Any]
) -> tuple[list[jax.Array], Rebuild]:
    """Flattens a dataclass that is not a pytree by fields, not by its constructor."""
    names = list(vars(record))

    def put_together(values):
        new = copy.copy(record)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(new, name, value)  # The dataclass may be frozen.
        return new

    return _flatten_all(list(vars(record).values()), known, put_together)


def _check_static(value: Any) -> None:
    """Refuses an opaque object that holds tracers, which would outlive their trace."""
    held = getattr(value, "__dict__", None)
    if isinstance(value, type | types.ModuleType) or not isinstance(held, dict):
        return
    traced = [k for k, v in held.items() if isinstance(v, Tracer)]
    if traced:
        name = type(value).__name__
        raise ValueError(
            f"A unit returned or kept a {name}, whose attribute(s) "
            f"{', '.join(traced)} hold arrays that were computed in it, and {name} is "
            "no pytree. Make it a dataclass, or register it with "
            "jax.tree_util.register_pytree_node_class."
        )


def _slots(node: Any) -> Slots | None:
    """Returns the slots of `node`; None if it is immutable or not looked into."""
    if is_shard(node) or isinstance(node, (jax.Array, np.ndarray)):
        return None
    if isinstance(node, nnx.Variable):
        return {"value": node.get_raw_value()}
    if isinstance(node, list):
        return dict(enumerate(node))
    if isinstance(node, dict):
        return dict(node)
    if isinstance(node, nnx.Pytree):
        # `_pytree__*` is flax's own state, such as the trace that the module is of.
        return {
            k: v for k, v in vars(node).items() if not k.startswith(NNX_STATE_PREFIX)
        }
    is_leaf = jax.tree_util.all_leaves([node])
    if is_leaf and not _is_record(node):
        return None
    held = getattr(node, "__dict__", None)
    return dict(held) if isinstance(held, dict) else None


def _children(node: Any) -> list[Any]:
    """Returns the children, one level down, of an immutable pytree such as a tuple."""
    if is_shard(node):
        return []
    children = jax.tree.leaves(node, is_leaf=lambda n: n is not node)
    return [child for child in children if child is not node]


def _is_open(node: Any) -> bool:
    """Returns whether to look into an object that the trace shares with its caller."""
    return isinstance(node, (list, dict)) or _is_record(node)


def _is_record(node: Any) -> bool:
    """Returns whether `node` is a dataclass or namespace that jax takes for a leaf."""
    if isinstance(node, type) or not hasattr(node, "__dict__"):
        return False
    is_record = dataclasses.is_dataclass(node) or isinstance(
        node, types.SimpleNamespace
    )
    return is_record and jax.tree_util.all_leaves([node])


def _write(outer: Any, new: Slots, deleted: Sequence[Hashable]) -> None:
    if isinstance(outer, nnx.Variable):
        outer.set_raw_value(new["value"])
    elif isinstance(outer, list):
        _write_list(outer, new, deleted)
    elif isinstance(outer, dict):
        outer.update(new)
        for key in deleted:
            del outer[key]
    else:
        for name, value in new.items():
            is_data = isinstance(outer, nnx.Pytree) and _holds_nodes(value)
            setattr(outer, str(name), nnx.data(value) if is_data else value)
        for name in deleted:
            delattr(outer, str(name))


def _write_list(outer: list[Any], new: Slots, deleted: Sequence[Hashable]) -> None:
    size = len(outer) - len(deleted)
    del outer[size:]
    for index, value in new.items():
        if isinstance(index, int) and index < size:
            outer[index] = value
        else:
            outer.append(value)


def _holds_nodes(value: Any) -> bool:
    """Returns whether a container holds nnx nodes, and so needs `nnx.data`."""

    def is_node(node):
        return isinstance(node, (nnx.Variable, nnx.Pytree))

    nodes = filter(is_node, jax.tree.leaves(value, is_leaf=is_node))
    return any(node is not value for node in nodes)
