"""Names and shapes of leaves on disk, independent of mesh and model library."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fsdp_jax._tree import PyTree, named_leaves
from fsdp_jax.optim._matrix_stack import MatrixStack, Member
from fsdp_jax.sharding._padded import Padded

# File of a step with the implementation of its PRNG keys, which their words do not
# show: other implementations have equally many.
IMPLS = "prng_impls.json"


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf as passed to Orbax.

    Attributes:
      value: Plain array or `jax.ShapeDtypeStruct`: the padded array of a `Padded` leaf,
        since only that is split evenly, and the `uint32` words of PRNG keys.
      shape: Logical shape, which is the shape on disk.
      impl: Implementation of PRNG keys, e.g. `"threefry2x32"`; None for other leaves.
    """

    value: Any
    shape: tuple[int, ...]
    impl: str | None = None

    @property
    def abstract(self) -> jax.ShapeDtypeStruct:
        """Abstract array of logical shape."""
        return jax.ShapeDtypeStruct(self.shape, self.value.dtype)

    @property
    def is_abstract(self) -> bool:
        """Whether the leaf has no value."""
        return isinstance(self.value, jax.ShapeDtypeStruct)


def flatten(tree: PyTree) -> dict[str, Leaf]:
    """Flattens a tree into leaves by dotted name; PRNG keys become `uint32` words.

    Args:
      tree: `TrainState` or any pytree of arrays or `jax.ShapeDtypeStruct`s.

    Raises:
      ValueError: If two leaves have the same name (`{"a.b": x, "a": {"b": y}}`), since
        the second would overwrite the first; or if a leaf is not an array.
    """
    named = [
        part for name, leaf in named_leaves(tree) for part in _by_parameter(name, leaf)
    ]
    twice = [name for name, n in Counter(name for name, _ in named).items() if n > 1]
    if twice:
        raise ValueError(
            f"Cannot save two leaves under one name: {', '.join(twice)}. Rename a key "
            "that has a dot in it."
        )
    plain = [name for name, leaf in named if not hasattr(leaf, "dtype")]
    if plain == [""]:
        raise ValueError(
            f"A {type(tree).__name__} is no tree of arrays. Pass a state, such as "
            "fsdp_jax.init_state(plan, tx, params) or its abstract_state(plan, tx)."
        )
    if plain:
        raise ValueError(
            f"{len(plain)} leaf/leaves are not arrays: {', '.join(plain)}. Make them "
            "arrays with jnp.asarray."
        )
    return {name: _leaf(leaf) for name, leaf in named}


def parts(name: str, node: Any) -> dict[str, Leaf]:
    """Returns the leaves of one node of `named_leaves`; several of a `MatrixStack`.

    Args:
      name: Name of the node in its tree.
      node: Array, abstract array, `Padded` or `MatrixStack`.
    """
    return {full: _leaf(leaf) for full, leaf in _by_parameter(name, node)}


def rebuild(like: PyTree, values: Callable[[str, Any], dict[str, Any]]) -> PyTree:
    """Restores the structure of `like`, one node after the other.

    Args:
      like: Tree that `parts` was called for, node by node.
      values: Function of name and node that returns arrays as for `unflatten`.
    """
    treedef = jax.tree.structure(like, is_leaf=_is_node)
    return treedef.unflatten(
        _filled(name, node, values(name, node)) for name, node in named_leaves(like)
    )


def unflatten(like: PyTree, values: dict[str, Any]) -> PyTree:
    """Restores the structure of `like`; inverse of `flatten`.

    Args:
      like: Tree that was flattened.
      values: Arrays by name, with the shape of the leaf's `value`. A leaf without one
        is left unchanged.
    """
    return rebuild(like, lambda name, node: values)


def layout(leaves: dict[str, Leaf]) -> dict[str, list[str]]:
    """Returns shape, dtype and sharding of every leaf, to compare processes by.

    A numpy array, which one process writes for all, is compared by value too.
    """
    return {
        name: [str(leaf.shape), str(leaf.value.dtype), _split(leaf.value)]
        for name, leaf in leaves.items()
    }


def is_key(leaf: Any) -> bool:
    """Returns whether `leaf` holds typed PRNG keys."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _split(value: Any) -> str:
    if isinstance(value, np.ndarray | np.generic):
        return hashlib.sha256(value.tobytes()).hexdigest()
    sharding = getattr(value, "sharding", None)
    return str(getattr(sharding, "spec", sharding))


def _leaf(leaf: Any) -> Leaf:
    if is_key(leaf):
        words = _key_words(leaf)
        return Leaf(words, tuple(words.shape), str(_impl(leaf)))
    return Leaf(leaf.value if _is_padded(leaf) else leaf, tuple(leaf.shape))


def _by_parameter(name: str, leaf: Any) -> list[tuple[str, Any]]:
    """Returns a leaf with its name; a stack is split into its parameters' parts."""
    if not isinstance(leaf, MatrixStack):
        return [(_full_name(name, leaf), leaf)]
    pieces = zip(leaf.members, leaf.by_member(), strict=True)
    return [
        (_member_name(name, member), Padded(piece, member.shape))
        for member, piece in pieces
    ]


def _full_name(name: str, leaf: Any) -> str:
    """Appends the parameter that a `Padded` leaf belongs to if its name lacks it."""
    of = leaf.of if _is_padded(leaf) else ""
    return f"{name} ({of})" if of else name


def _member_name(name: str, member: Member) -> str:
    """Replaces the last component, the stack's name, which depends on the sharding."""
    return f"{name.rpartition('.')[0]}.{member.name}"


def _filled(name: str, leaf: Any, values: dict[str, Any]) -> Any:
    if isinstance(leaf, MatrixStack):
        return _stacked(name, leaf, values)
    value = values.get(_full_name(name, leaf))
    if value is None:
        return leaf
    if is_key(leaf):
        return _as_key(value, leaf)
    return dataclasses.replace(leaf, value=value) if _is_padded(leaf) else value


def _stacked(name: str, leaf: MatrixStack, values: dict[str, Any]) -> MatrixStack:
    """Stacks the values of the parameters; those not given are left unchanged."""
    names = [_member_name(name, member) for member in leaf.members]
    given = {n: values[n] for n in names if n in values}
    if not given:
        return leaf
    if len(given) < len(names):
        given = dict(zip(names, leaf.by_member(), strict=True)) | given
    return leaf.filled([given[n] for n in names])


def _is_padded(leaf: Any) -> bool:
    return isinstance(leaf, Padded)


def _is_node(leaf: Any) -> bool:
    return isinstance(leaf, Padded | MatrixStack)


def _key_words(leaf: Any) -> Any:
    """Returns the words of PRNG keys; of abstract keys, abstract words."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        words = jax.eval_shape(jax.random.key_data, leaf)
        return jax.ShapeDtypeStruct(words.shape, words.dtype, sharding=leaf.sharding)
    return jax.random.key_data(leaf)


def _as_key(words: jax.Array, like: Any) -> jax.Array:
    """Wraps words as PRNG keys with the implementation of `like`."""
    return jax.random.wrap_key_data(words, impl=_impl(like))


def _impl(keys: Any) -> Any:
    impls: list[Any] = []  # `key_impl` takes arrays and tracers only, so trace it.
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), keys)
    return impls[0]
