"""Sum of squared probabilities over a vocabulary that is split over `tp`."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fsdp_jax.ops.vocab._chunked import Chunk, chunk_of, in_float32, over_chunks
from fsdp_jax.ops.vocab._shard import Part, on_each_part


def vocab_parallel_sum_pi_squared(
    logits: Float[Array, "*batch vocab"],
    *,
    axis: str = "tp",
    vocab_size: int | None = None,
) -> Float[Array, "*batch"]:
    """Sums the squared softmax of each token's logits, without gathering them.

    This is the probability that two samples agree; optimal baselines of policy
    gradients weigh tokens by it. For automatic, manual and absent `axis` see
    `vocab_parallel_cross_entropy`.

    Args:
      logits: Logits of any floating dtype; sums are in float32.
      axis: Mesh axis that splits the vocabulary.
      vocab_size: Number of entries that count, if those after them are padding. Default
        all.

    Returns:
      The sums, float32, between 1 / vocab_size and 1.

    Raises:
      ValueError: If the vocabulary does not divide over `axis`, or is smaller than
        `vocab_size`.

    Source: verl `utils/torch_functional.py::calculate_sum_pi_squared_from_logits`.
    """
    dims = (logits.ndim - 1,)
    return on_each_part(_of_part, (logits,), dims, axis=axis, vocab_size=vocab_size)


def _of_part(part: Part, logits: Array) -> Array:
    *batch, size = logits.shape
    lse, twice = _differentiable(part, logits.reshape(math.prod(batch), size))
    peak = part.max(lse)
    # sum(p^2) = sum(e^2x) / sum(e^x)^2, both relative to the peak, which cancels.
    exp, squares = part.sum((jnp.exp(lse - peak), jnp.exp(twice - 2 * peak)))
    return (squares / exp**2).reshape(batch)


def _of_rank(part: Part, logits: Array) -> tuple[Array, Array]:
    """Returns the `logsumexp` of a rank's logits, and that of twice the logits."""
    chunks = over_chunks(part, logits, _of_chunk)
    lse, twice = (jax.nn.logsumexp(of_chunks, axis=0) for of_chunks in chunks)
    return lse, twice


def _of_chunk(chunk: Chunk, logits: Array) -> tuple[Array, Array]:
    logits = jnp.where(chunk.counts & chunk.is_new, logits, -jnp.inf)
    return jax.nn.logsumexp(logits, axis=-1), jax.nn.logsumexp(2 * logits, axis=-1)


def _forward(part: Part, logits):
    lse, twice = _of_rank(part, logits)
    return (lse, twice), (logits, lse, twice)


def _backward(part: Part, saved, grads):
    logits, lse, twice = saved
    of_lse, of_twice = grads
    counts = chunk_of(part, logits.shape[1], 1, 0).counts & ~jnp.isneginf(logits)
    wide = jnp.where(counts, in_float32(logits), 0)
    grad = of_lse[:, None] * jnp.exp(wide - lse[:, None])
    grad += 2 * of_twice[:, None] * jnp.exp(2 * wide - twice[:, None])
    return (jnp.where(counts, grad, 0).astype(logits.dtype),)


_differentiable = jax.custom_vjp(_of_rank, nondiff_argnums=(0,))
_differentiable.defvjp(_forward, _backward)
