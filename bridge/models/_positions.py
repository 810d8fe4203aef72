"""Signature and default of the decoder's token positions."""

from typing import Protocol

import jax
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


def text_starts(segment_ids: Ids) -> Ids:
    """Returns the index in its row of the first token of each token's text.

    Args:
      segment_ids: Segment of each token; those of a text are consecutive.
    """
    row = positions_in_order(segment_ids)
    begins = jnp.not_equal(segment_ids[:, 1:], segment_ids[:, :-1])
    first = jnp.zeros_like(row).at[:, 1:].set(jnp.where(begins, row[:, 1:], 0))
    return jax.lax.cummax(first, axis=1)


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


def check_whole_rows(config: DecoderConfig, subject: str) -> None:
    """Raises a `ValueError` if attention reads whole rows, of which a device has parts.

    Args:
      config: Config of the decoder.
      subject: What splits the rows, for the message.
    """
    parts = {
        "indexer": "selects among all keys of a row",
        "block_indexer": "selects among all blocks of a row",
        "compressed_attention": "has entries of all windows of a row",
        "dynamic_mask_size": "bounds the keys of a row",
    }
    wrong = [f"{k} {why}" for k, why in parts.items() if getattr(config, k) is not None]
    if wrong:
        raise ValueError(
            f"{subject}: {'; '.join(wrong)}, and each rank would know those of its "
            "part. Use cp=1."
        )
