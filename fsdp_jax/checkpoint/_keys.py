"""How the leaves of a state are called on disk, whatever mesh or model made them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp

from fsdp_jax._tree import PyTree, named_leaves


def flatten(tree: PyTree) -> dict[str, Any]:
    """One flat dict of dotted names, PRNG keys as their `uint32` words.

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
    return {name: key_words(leaf) if is_key(leaf) else leaf for name, leaf in named}


def unflatten(mould: PyTree, leaves: dict[str, Any]) -> PyTree:
    """The inverse of `flatten`, in the structure of `mould`."""
    values = [
        as_key(leaves[name], leaf) if is_key(leaf) else leaves[name]
        for name, leaf in named_leaves(mould)
    ]
    return jax.tree.structure(mould).unflatten(values)


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
