"""State space model of Mamba 2, computed by chunks of tokens.

For each token, the state (a matrix of channels by state size) decays and adds an outer
product: `state = decay * state + x b^T`; the token reads `state c`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from bridge.models._chunked_decay import (
    chunk_decays,
    from_chunks,
    ids_to_chunks,
    to_chunks,
)

State = Float[Array, "batch heads head_dim state"]


def state_space(
    x: Float[Array, "batch seq heads head_dim"],
    b: Float[Array, "batch seq heads state"],
    c: Float[Array, "batch seq heads state"],
    log_decay: Float[Array, "batch seq heads"],
    state: State | None = None,
    segment_ids: Int[Array, "batch seq"] | None = None,
    *,
    chunk_size: int,
) -> tuple[Float[Array, "batch seq heads head_dim"], State]:
    """Runs the recurrence over all tokens, at least in float32.

    Args:
      x: Inputs of the channels, multiplied by the time step.
      b: Projection of each token into the state.
      c: Projection of the state for each token.
      log_decay: Logarithm of the decay of each token.
      state: State before the first token; None for zeros.
      segment_ids: Segment of each token in a packed row, each of which begins with a
        state of zeros; None for one segment.
      chunk_size: Number of tokens that are computed at once.

    Returns:
      What each token reads, and the state after the last token.

    Source: Mamba 2, https://arxiv.org/abs/2405.21060, section 6.
    """
    seq = x.shape[1]
    wide = jnp.promote_types(x.dtype, jnp.float32)
    size = min(chunk_size, seq)
    x, b, c, g = (to_chunks(part.astype(wide), size) for part in (x, b, c, log_decay))
    decays = chunk_decays(g, ids_to_chunks(segment_ids, size))
    near = (c @ jnp.swapaxes(b, -1, -2)) * decays.between @ x

    def chunk(state, slices):
        reads, added, through = slices
        out = reads @ jnp.swapaxes(state, -1, -2)
        return state * through[..., None, None] + added, out

    if state is None:
        state = jnp.zeros((*x.shape[1:3], x.shape[-1], b.shape[-1]), wide)
    added = jnp.swapaxes(x, -1, -2) @ (b * decays.to_end[..., None])
    reads = c * decays.from_start[..., None]
    state, far = jax.lax.scan(chunk, state.astype(wide), (reads, added, decays.through))
    return from_chunks(near + far, seq), state
