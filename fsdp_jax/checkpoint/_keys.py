"""How the leaves of a state are called on disk, whatever mesh or model made them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from fsdp_jax._padded import Padded, pack, unpack
from fsdp_jax._tree import PyTree, named_leaves


def flatten(tree: PyTree) -> dict[str, Any]:
    """One flat dict of dotted names; logical shapes, PRNG keys as `uint32` words.

    Args:
      tree: A `TrainState` or any pytree of arrays or `jax.ShapeDtypeStruct`s.

    Raises:
      ValueError: If two leaves have one name (`{"a.b": x, "a": {"b": y}}`): the second
        would overwrite the first.
    """
    named = named_leaves(tree)
    twice = [name for name, n in Counter(name for name, _ in named).items() if n > 1]
    if twice:
        raise ValueError(
            f"Cannot save two leaves under one name: {', '.join(twice)}. Rename a key "
            "that has a dot in it."
        )
    return {name: _stored(leaf) for name, leaf in named}


def unflatten(mould: PyTree, leaves: dict[str, Any]) -> PyTree:
    """The inverse of `flatten`, in the structure of `mould`."""
    values, treedef = [], jax.tree.structure(mould, is_leaf=_is_padded)
    for name, leaf in named_leaves(mould):
        value = as_key(leaves[name], leaf) if is_key(leaf) else leaves[name]
        values.append(_repacked(value, leaf) if _is_padded(leaf) else value)
    return treedef.unflatten(values)


def _stored(leaf: Any) -> Any:
    """The plain array, or its shape, that stands for a leaf on disk."""
    if is_key(leaf):
        return key_words(leaf)
    if not _is_padded(leaf):
        return leaf
    if isinstance(leaf.value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=_whole(leaf))
    return jax.jit(unpack, out_shardings=_whole(leaf))(leaf)


def _repacked(value: jax.Array, mould: Padded) -> Padded:
    padding = jax.jit(lambda v: pack(v, mould), out_shardings=mould.value.sharding)
    return padding(value)


def _whole(leaf: Padded) -> NamedSharding:
    """On every device, while it is written or read: it is seldom large."""
    return NamedSharding(leaf.value.sharding.mesh, PartitionSpec())


def _is_padded(leaf: Any) -> bool:
    return isinstance(leaf, Padded)


def is_key(leaf: Any) -> bool:
    """Whether `leaf` holds typed PRNG keys."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def key_words(leaf: Any) -> Any:
    """The words of a PRNG key array, or their abstract shape with the same sharding."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        words = jax.eval_shape(jax.random.key_data, leaf)
        return jax.ShapeDtypeStruct(words.shape, words.dtype, sharding=leaf.sharding)
    return jax.random.key_data(leaf)


def as_key(words: jax.Array, mould: Any) -> jax.Array:
    """The PRNG keys of the kind of `mould` that have these words."""
    impls: list[Any] = []  # jax tells a key's kind for arrays and tracers only.
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), mould)
    return jax.random.wrap_key_data(words, impl=impls[0])
