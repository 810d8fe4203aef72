"""State space model of Mamba 1, computed by chunks of tokens.

For each token, the state of a channel (a vector) decays, each element by a factor of
its own, and adds the channel's input times a vector: `state = decay * state + x b`; the
token reads `state . c`. As no two elements of a state share a decay, tokens of a chunk
are combined by a scan of pairs `(decay, added)`, and not by products of matrices.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

_CHUNK = 64
"""Tokens whose states are in memory at once: results depend on it by rounding alone."""

State = Float[Array, "batch channels state"]


def selective_scan(
    x: Float[Array, "batch seq channels"],
    b: Float[Array, "batch seq *heads state"],
    c: Float[Array, "batch seq *heads state"],
    step: Float[Array, "batch seq channels"],
    rate: Float[Array, "channels state"],
    state: State | None = None,
    segment_ids: Int[Array, "batch seq"] | None = None,
) -> tuple[Float[Array, "batch seq channels"], State]:
    """Runs the recurrence over all tokens, at least in float32.

    Args:
      x: Inputs of the channels.
      b: Projection of each token into the state, of all channels or of each head,
        whose channels are next to each other.
      c: Projection of the state for each token, likewise.
      step: Time step of each token; one of 0 neither decays nor adds.
      rate: Logarithm of the decay per unit of time, negative.
      state: State before the first token; None for zeros.
      segment_ids: Segment of each token in a packed row, each of which begins with a
        state of zeros; None for one segment.

    Returns:
      What each token reads, and the state after the last token.

    Source: Mamba, https://arxiv.org/abs/2312.00752, section 3.
    """
    batch, seq, channels = x.shape
    wide = jnp.promote_types(x.dtype, jnp.float32)
    size = min(_CHUNK, seq)
    if state is None:
        state = jnp.zeros((batch, channels, b.shape[-1]), wide)
    rate = jnp.expand_dims(rate.astype(wide), (0, 1))

    # The states of a chunk are computed again in the backward pass: all of them would
    # be as many times larger than the tokens as a state is wide.
    @jax.checkpoint
    def chunk(state, slices):
        x, b, c, step, begins = slices
        decay = jnp.exp(step[..., None] * rate)
        decay = jnp.where(begins[..., None, None], 0, decay)
        added = (step * x)[..., None] * _by_channel(b, channels)
        decays, sums = jax.lax.associative_scan(combine, (decay, added), axis=1)
        states = sums + decays * state[:, None]
        return states[:, -1], (states * _by_channel(c, channels)).sum(-1)

    parts = (
        *(part.astype(wide) for part in (x, b, c, step)),
        begins_segment(x, segment_ids),
    )
    chunks = tuple(_to_chunks(part, size) for part in parts)
    state, out = jax.lax.scan(chunk, state.astype(wide), chunks)
    return jnp.moveaxis(out, 0, 1).reshape(batch, -1, channels)[:, :seq], state


def combine(
    before: tuple[Array, Array], then: tuple[Array, Array]
) -> tuple[Array, Array]:
    """Combines what two runs of tokens do to a state, one after the other.

    Args:
      before: Decay and addend of the first run.
      then: Those of the second.
    """
    return before[0] * then[0], before[1] * then[0] + then[1]


def begins_segment(
    x: Array, ids: Int[Array, "batch seq"] | None
) -> Bool[Array, "batch seq"]:
    """Returns which tokens begin a segment that follows another of their row.

    Args:
      x: Inputs, whose first dims are those of the tokens.
      ids: Segment of each token; None for one segment.
    """
    if ids is None:
        return jnp.zeros(x.shape[:2], jnp.bool_)
    return jnp.concatenate([jnp.zeros_like(ids[:, :1]), jnp.diff(ids)], axis=1) != 0


def _by_channel(part: Array, channels: int) -> Array:
    """Returns projections of the state with a dim of channels, which may be 1."""
    if part.ndim == 3:
        return part[:, :, None]
    return jnp.repeat(part, channels // part.shape[2], axis=2)


def _to_chunks(part: Array, size: int) -> Array:
    """Splits tokens into chunks, a leading dim, with zeros behind the last token."""
    batch, seq, *rest = part.shape
    count = -(-seq // size)
    widths = [(0, 0), (0, count * size - seq), *((0, 0) for _ in rest)]
    chunks = jnp.pad(part, widths).reshape(batch, count, size, *rest)
    return jnp.moveaxis(chunks, 1, 0)
