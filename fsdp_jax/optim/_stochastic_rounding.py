"""Rounding to bfloat16 that is right on the mean."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float, Key

from fsdp_jax._tree import PyTree


def stochastic_round(
    x: Float[Array, "*shape"], key: Key[Array, ""]
) -> BFloat16[Array, "*shape"]:
    """Rounds float32 to one of its two neighbours in bfloat16, more often the nearer.

    The mean over keys is `x`. What bfloat16 holds stays as it is, and so does what is
    not finite. The bits of an element depend on its place in the array and the key
    alone, so that any mesh rounds alike.

    Args:
      x: float32, any shape.
      key: Of this array and step.
    """
    word = lax.bitcast_convert_type(x, jnp.uint32)
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    cut = (word + noise) & jnp.uint32(0xFFFF0000)
    rounded = lax.bitcast_convert_type(cut, jnp.float32)
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)


def round_stochastically(tree: PyTree, like: PyTree, key: Key[Array, ""]) -> PyTree:
    """The tree, each leaf rounded to bfloat16 where that of `like` is.

    Args:
      tree: Wide.
      like: Its leaves in their own dtypes.
      key: Of this step; each leaf has one of its own.
    """
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten(
        stochastic_round(leaf, jax.random.fold_in(key, number))
        if old.dtype == jnp.bfloat16
        else leaf
        for number, (leaf, old) in enumerate(
            zip(leaves, jax.tree.leaves(like), strict=True)
        )
    )


def widened(leaf: Any) -> Any:
    """A bfloat16 leaf, or its shape, in float32; all else as it is."""
    if leaf.dtype != jnp.bfloat16:
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=leaf.sharding)
    return leaf.astype(jnp.float32)
