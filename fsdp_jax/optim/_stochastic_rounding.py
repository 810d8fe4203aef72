"""Stochastic rounding to bfloat16, unbiased in expectation."""

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
    """Rounds float32 to one of its two bfloat16 neighbours, more often the nearer.

    The mean over keys is `x`. Values that bfloat16 represents exactly and values that
    are not finite are unchanged. The random bits of an element depend only on its index
    in the array and on the key, so that the result does not depend on the mesh.

    Args:
      x: float32 array of any shape.
      key: PRNG key of this array and step.

    Returns:
      The rounded array, bfloat16.
    """
    # bfloat16 is the upper half of float32. Uniform noise added to the lower half
    # carries into the upper one with a probability proportional to the lower half.
    word = lax.bitcast_convert_type(x, jnp.uint32)
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    cut = (word + noise) & jnp.uint32(0xFFFF0000)
    rounded = lax.bitcast_convert_type(cut, jnp.float32)
    # Noise would make NaN of infinity.
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)


def round_stochastically(tree: PyTree, like: PyTree, key: Key[Array, ""]) -> PyTree:
    """Rounds each leaf to bfloat16 where the leaf of `like` is bfloat16.

    Args:
      tree: Tree of float32 arrays, and of arrays that are not rounded.
      like: Tree of the same structure, whose leaves have the wanted dtypes.
      key: PRNG key of this step; each leaf has a key of its own.
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
    """Casts a bfloat16 leaf, concrete or abstract, to float32; others are unchanged."""
    if leaf.dtype != jnp.bfloat16:
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=leaf.sharding)
    return leaf.astype(jnp.float32)
