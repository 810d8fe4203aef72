"""Where tokens stand in their rows: the decoder's word for it."""

from typing import Protocol

import jax.numpy as jnp
from jaxtyping import Array, Int

Ids = Int[Array, "batch seq"]


class Positions(Protocol):
    """What the decoder asks where a call does not say."""

    def __call__(self, tokens: Ids) -> Ids:
        """Returns the position of each token in its row."""
        ...


def positions_in_order(tokens: Ids) -> Ids:
    """Counts from 0 in each row: the default of the decoder's `positions`.

    Args:
      tokens: Whole rows, in the order of the text.
    """
    row = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    return jnp.broadcast_to(row[None, :], tokens.shape)
