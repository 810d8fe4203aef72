"""Decays between tokens, for recurrences that are computed by chunks of tokens.

A recurrence `state[t] = decay[t] * state[t - 1] + update[t]` over a long text is a
product of small matrices within each chunk, and a loop over chunks. What both need are
products of decays: between two tokens, from the state before a chunk to each token, and
from each token to the end. Where segments of a packed row meet, a product is 0.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Chunked = Float[Array, "chunks batch heads chunk *dims"]


class Decays(NamedTuple):
    """Products of decays in each chunk.

    Attributes:
      between: From token `j` to token `i >= j`; 0 for `i < j`.
      from_start: From the state before the chunk to each token.
      to_end: From each token to the end of the chunk.
      through: From the state before the chunk to its end.
    """

    between: Float[Array, "chunks batch heads chunk chunk"]
    from_start: Float[Array, "chunks batch heads chunk"]
    to_end: Float[Array, "chunks batch heads chunk"]
    through: Float[Array, "chunks batch heads"]

    def products(self, a: Chunked, b: Chunked) -> Array:
        """Returns the decayed product of each row of `a` and those of `b` up to it."""
        return a @ jnp.swapaxes(b, -1, -2) * self.between

    def since_start(self, x: Chunked) -> Chunked:
        """Returns rows, decayed from the state before the chunk."""
        return x * self.from_start[..., None]

    def until_end(self, x: Chunked) -> Chunked:
        """Returns rows, decayed to the end of the chunk."""
        return x * self.to_end[..., None]

    @property
    def of_state(self) -> Array:
        """Decay of the state through each chunk, beside its two dims."""
        return self.through[..., None, None]


def chunk_decays(
    log_decay: Float[Array, "chunks batch heads chunk"],
    segment_ids: Int[Array, "chunks batch chunk"] | None,
) -> Decays:
    """Multiplies decays, which are given as their logarithms.

    Args:
      log_decay: Logarithm of the decay of each token, at most 0.
      segment_ids: Segment of each token; None for one segment.
    """
    total = jnp.cumsum(log_decay, axis=-1)
    seen, reached = visible(segment_ids, total.shape[-1])
    # Masked before the exponential: above the diagonal it would overflow.
    between = jnp.exp(
        jnp.where(seen, total[..., :, None] - total[..., None, :], -jnp.inf)
    )
    from_start = jnp.exp(total)
    if reached is not None:
        from_start = jnp.where(reached, from_start, 0)
    return Decays(between, from_start, between[..., -1, :], from_start[..., -1])


def visible(
    segment_ids: Int[Array, "chunks batch chunk"] | None, size: int
) -> tuple[Array, Array | None]:
    """Returns which tokens see which, and which see the state before their chunk.

    Args:
      segment_ids: Segment of each token; None for one segment.
      size: Number of tokens of a chunk.

    Returns:
      Masks `[chunks, batch, 1, chunk, chunk]` and `[chunks, batch, 1, chunk]`; the
      second is None if all do.
    """
    seen = jnp.tril(jnp.ones((1, 1, 1, size, size), jnp.bool_))
    if segment_ids is None:
        return seen, None
    ids = segment_ids[:, :, None]
    seen = seen & (ids[..., :, None] == ids[..., None, :])
    # The state before a chunk is that of the last token of the chunk before.
    last = jnp.concatenate([ids[:1, ..., :1], ids[:-1, ..., -1:]])
    return seen, ids == last


def to_chunks(x: Float[Array, "batch seq heads *dims"], size: int) -> Chunked:
    """Splits tokens into chunks, with zeros behind the last token."""
    batch, seq, *rest = x.shape
    chunks = -(-seq // size)
    widths = [(0, 0), (0, chunks * size - seq), *((0, 0) for _ in rest)]
    x = jnp.pad(x, widths).reshape(batch, chunks, size, *rest)
    return jnp.moveaxis(jnp.moveaxis(x, 1, 0), 3, 2)


def ids_to_chunks(
    ids: Int[Array, "batch seq"] | None, size: int
) -> Int[Array, "chunks batch chunk"] | None:
    """Splits segment ids into chunks, the last id repeated behind the last token."""
    if ids is None:
        return None
    chunks = -(-ids.shape[1] // size)
    padded = jnp.pad(ids, ((0, 0), (0, chunks * size - ids.shape[1])), mode="edge")
    return jnp.moveaxis(padded.reshape(len(ids), chunks, size), 1, 0)


def from_chunks(x: Chunked, seq: int) -> Float[Array, "batch seq heads *dims"]:
    """Joins chunks; the inverse of `to_chunks`."""
    x = jnp.moveaxis(jnp.moveaxis(x, 2, 3), 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :seq]
