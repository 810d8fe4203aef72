"""Signature and default of the decoder's token positions."""

from typing import Protocol

import jax.numpy as jnp
from jaxtyping import Array, Int

from bridge.models._config import DecoderConfig

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


def check_length(config: DecoderConfig, length: int, subject: str) -> None:
    """Raises a `ValueError` if texts are longer than a table of learned positions.

    Positions behind its end would be NaN.

    Args:
      config: Config of the decoder; any length fits one without such a table.
      length: Tokens of the longest text.
      subject: What has this length, for the message.
    """
    longest = config.max_position_embeddings
    if config.learned_positions and length > longest:
        raise ValueError(
            f"{subject}: {length} tokens, but this {config.model_type} has learned "
            f"positions for max_position_embeddings = {longest}. Use at most {longest}."
        )


def check_whole_rows(config: DecoderConfig) -> None:
    """Checks that attention reads rows of which a device has a part.

    Args:
      config: Config of the decoder.

    Raises:
      ValueError: If attention reads whole rows.
    """
    wrong = []
    if config.indexer is not None:
        wrong.append("indexer: it selects among all keys of a row")
    if config.block_indexer is not None:
        wrong.append("block_indexer: it selects among all blocks of a row")
    if config.compressed_attention is not None:
        wrong.append("compressed_attention: its entries are of all windows of a row")
    if wrong:
        raise ValueError(
            f"{'; '.join(wrong)}, and these positions are of a part of each row. Use "
            "cp=1."
        )
