"""Decays of each channel of the keys between tokens of a chunk.

A product of two rows, decayed by channel, is a sum of `a * b * exp(total_i - total_j)`,
where `total` is the logarithm of the decay from the start of the chunk, which falls
with the tokens. Both factors of the exponential can be far beyond float32 although
their product is at most 1, so it is split at the first token of the block of `i`:

| tokens `j` | left factor | right factor |
|---|---|---|
| of earlier blocks | `exp(total_i - first)` <= 1 | `exp(first - total_j)` <= 1 |
| of the same block | `exp(total_i - total_j)` for each pair | |
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from bridge.models._chunked_decay import Chunked, visible

BLOCK = 16
"""Tokens of a block, whose pairs are decayed one by one."""


class ChannelDecays(NamedTuple):
    """Products of decays in each chunk, by channel.

    Attributes:
      total: Logarithm of the decay from the start of the chunk to each token.
      seen: Which tokens each token sees.
      reached: Which tokens see the state before the chunk; None if all do.
    """

    total: Chunked
    seen: Array
    reached: Array | None

    def products(self, a: Chunked, b: Chunked) -> Array:
        """Returns the decayed product of each row of `a` and those of `b` up to it."""
        blocks = range(0, a.shape[-2], BLOCK)
        made = jnp.concatenate([self._of_block(a, b, start) for start in blocks], -2)
        return jnp.where(self.seen, made, 0)

    def _of_block(self, a: Chunked, b: Chunked, start: int) -> Array:
        """Returns the products of the rows of a block, with zeros behind it."""
        end = start + BLOCK
        here, before = (x[..., start:end, :] for x in (a, self.total))
        first = before[..., :1, :]
        left = here * jnp.exp(before - first)
        right = b[..., :start, :] * jnp.exp(first - self.total[..., :start, :])
        far = left @ jnp.swapaxes(right, -1, -2)
        pairs = before[..., :, None, :] - before[..., None, :, :]
        in_order = jnp.tril(jnp.ones((BLOCK, BLOCK), jnp.bool_))[..., None]
        decays = jnp.exp(jnp.where(in_order, pairs, -jnp.inf))
        own = b[..., None, start:end, :]
        near = jnp.sum(here[..., :, None, :] * own * decays, axis=-1)
        behind = jnp.zeros((*near.shape[:-1], a.shape[-2] - end), near.dtype)
        return jnp.concatenate([far, near, behind], axis=-1)

    def since_start(self, x: Chunked) -> Chunked:
        """Returns rows, decayed from the state before the chunk."""
        return self._reaching(x * jnp.exp(self.total))

    def until_end(self, x: Chunked) -> Chunked:
        """Returns rows, decayed to the end of the chunk."""
        decayed = x * jnp.exp(self.total[..., -1:, :] - self.total)
        return jnp.where(self.seen[..., -1, :, None], decayed, 0)

    @property
    def of_state(self) -> Array:
        """Decay of the state through each chunk, beside its two dims."""
        through = self._reaching(jnp.exp(self.total))[..., -1, :]
        return through[..., None]

    def _reaching(self, x: Chunked) -> Chunked:
        return x if self.reached is None else jnp.where(self.reached[..., None], x, 0)


def channel_decays(
    log_decay: Float[Array, "chunks batch heads chunk key_dim"],
    segment_ids: Int[Array, "chunks batch chunk"] | None,
) -> ChannelDecays:
    """Multiplies decays of each channel, which are given as their logarithms.

    Args:
      log_decay: Logarithm of the decay of each channel and token, at most 0.
      segment_ids: Segment of each token; None for one segment.
    """
    total = jnp.cumsum(log_decay, axis=-2)
    return ChannelDecays(total, *visible(segment_ids, total.shape[-2]))
