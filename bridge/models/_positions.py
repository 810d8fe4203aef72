"""Signature and default of the decoder's token positions."""

from typing import Protocol

import jax.numpy as jnp
from jaxtyping import Array, Int

Ids = Int[Array, "batch seq"]


class Positions(Protocol):
    """Signature of the function that returns positions if a call has none."""

    def __call__(self, tokens: Ids) -> Ids:
        """Returns the position of each token in its row."""
        ...


def positions_in_order(tokens: Ids) -> Ids:
    """Returns positions from 0 in each row: the default of the decoder's `positions`.

    Args:
      tokens: Token ids of complete rows, in the order of the text.
    """
    row = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    return jnp.broadcast_to(row[None, :], tokens.shape)
