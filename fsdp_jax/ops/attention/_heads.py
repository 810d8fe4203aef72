"""Heads that ranks share: whether they divide, and copies of key and value heads."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jaxtyping import Array


def check_heads(heads: int, ranks: int, axis: str, other_way: str = "") -> None:
    """Checks that ranks divide the query heads.

    Args:
      heads: Number of query heads.
      ranks: Ranks that share them.
      axis: Mesh axis of the ranks.
      other_way: What to use instead, before "fewer ranks"; "" for nothing.

    Raises:
      ValueError: If they do not.
    """
    if heads % ranks:
        raise ValueError(
            f"Attention of {heads} heads does not divide over {ranks} ranks of "
            f"'{axis}'. Use {other_way}fewer ranks, a divisor of {heads}."
        )


def repeat_heads(heads: Array, ranks: int) -> Array:
    """Repeats each key or value head as often as needed for the ranks to divide them.

    Args:
      heads: Keys or values, `[batch, seq, kv_heads, head_dim]`.
      ranks: Ranks that share them.
    """
    number = heads.shape[2]
    return jnp.repeat(heads, math.lcm(number, ranks) // number, axis=2)
