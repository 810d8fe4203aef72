"""Gated delta rule, computed by chunks of tokens.

For each token, the state (a matrix from keys to values) decays, forgets what it has for
the token's key, and learns the token's value: `state = decay * state`, then
`state += beta * key (value - state^T key)^T`. Within a chunk, the values that are
learned solve a triangular system, as each depends on those before.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from bridge.models._channel_decay import BLOCK, ChannelDecays, channel_decays
from bridge.models._chunked_decay import (
    Chunked,
    Decays,
    chunk_decays,
    from_chunks,
    ids_to_chunks,
    to_chunks,
)

_CHUNK = 64

State = Float[Array, "batch heads key_dim value_dim"]


def gated_delta_rule(
    query: Float[Array, "batch seq heads key_dim"],
    key: Float[Array, "batch seq heads key_dim"],
    value: Float[Array, "batch seq heads value_dim"],
    log_decay: Float[Array, "batch seq heads *key_dim"],
    beta: Float[Array, "batch seq heads"],
    state: State | None = None,
    segment_ids: Int[Array, "batch seq"] | None = None,
) -> tuple[Float[Array, "batch seq heads value_dim"], State]:
    """Runs the recurrence over all tokens, at least in float32.

    Args:
      query: Queries, scaled.
      key: Keys, of length 1.
      value: Values.
      log_decay: Logarithm of the decay of each token, one of a head or one of each dim
        of its keys.
      beta: How much of a token is learned, from 0 to 1.
      state: State before the first token; None for zeros.
      segment_ids: Segment of each token in a packed row, each of which begins with a
        state of zeros; None for one segment.

    Returns:
      What each token's query reads from the state, and the state after the last token.

    Source: Gated Delta Networks, https://arxiv.org/abs/2412.06464, section 3.3; Kimi
      Linear, https://arxiv.org/abs/2510.26692, section 3, for decays of each dim.
    """
    seq = query.shape[1]
    wide = jnp.promote_types(query.dtype, jnp.float32)
    by_dim = log_decay.ndim == key.ndim
    size = min(_CHUNK, -(-seq // BLOCK) * BLOCK if by_dim else seq)
    q, k, v, g, b = (
        to_chunks(x.astype(wide), size) for x in (query, key, value, log_decay, beta)
    )
    ids = ids_to_chunks(segment_ids, size)
    decays = channel_decays(g, ids) if by_dim else chunk_decays(g, ids)
    learned, found_before = _learned(k, v, b[..., None], decays)

    def chunk(state, slices):
        learned, found_before, reads, near, writes, through = slices
        new = learned - found_before @ state
        out = reads @ state + near @ new
        return state * through + _transposed(writes) @ new, out

    if state is None:
        state = jnp.zeros((*k.shape[1:3], k.shape[-1], v.shape[-1]), wide)
    state, out = jax.lax.scan(
        chunk,
        state.astype(wide),
        (
            *(learned, found_before, decays.since_start(q)),
            decays.products(q, k),
            decays.until_end(k),
            decays.of_state,
        ),
    )
    return from_chunks(out, seq), state


def _learned(
    k: Chunked, v: Chunked, b: Chunked, decays: Decays | ChannelDecays
) -> tuple[Chunked, Chunked]:
    """Solves for what the tokens of each chunk learn.

    Returns:
      What they learn from a state of zeros, and the matrix whose product with the state
      before the chunk they learn less.
    """
    # Row i: how much of what token j < i learned is what token i finds for its key.
    found = jnp.tril(decays.products(k * b, k), -1)
    sides = jnp.concatenate([v * b, decays.since_start(k * b)], axis=-1)
    solved = jax.scipy.linalg.solve_triangular(
        found, sides, lower=True, unit_diagonal=True
    )
    learned, found_before = jnp.split(solved, [v.shape[-1]], axis=-1)
    return learned, found_before


def _transposed(x: Array) -> Array:
    return jnp.swapaxes(x, -1, -2)
