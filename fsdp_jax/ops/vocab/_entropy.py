"""Entropy of a distribution over a vocabulary that is split over `tp`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fsdp_jax._tree import PyTree
from fsdp_jax.ops.vocab._chunked import Chunk, chunk_of, in_float32, over_chunks
from fsdp_jax.ops.vocab._shard import Part, on_each_part


def vocab_parallel_entropy(
    logits: Float[Array, "*batch vocab"],
    *,
    axis: str = "tp",
    vocab_size: int | None = None,
) -> Float[Array, "*batch"]:
    """Computes the entropy of each token's softmax without gathering the logits.

    The residuals are the logits in their own dtype and a few numbers per token;
    upstream subtracts the maximum from the logits in place and adds it back, which
    rounds them. For automatic, manual and absent `axis` see
    `vocab_parallel_cross_entropy`.

    Args:
      logits: Logits of any floating dtype; sums are in float32. A logit of minus
        infinity has probability 0 and adds nothing.
      axis: Mesh axis that splits the vocabulary.
      vocab_size: Number of entries that count, if those after them are padding. Default
        all.

    Returns:
      The entropies in nats, float32.

    Raises:
      ValueError: If the vocabulary does not divide over `axis`, or is smaller than
        `vocab_size`.

    Source: verl `megatron/tensor_parallel.py::vocab_parallel_entropy`.
    """
    dims = (logits.ndim - 1,)
    return on_each_part(_of_part, (logits,), dims, axis=axis, vocab_size=vocab_size)


def _of_part(part: Part, logits: Array) -> Array:
    *batch, size = logits.shape
    lse, entropy = _differentiable(part, logits.reshape(math.prod(batch), size))
    # Outside of the custom_vjp: autodiff of these per-token values adds the collectives
    # that the gradient needs.
    _, entropy = _joined(lse, entropy, part.max(lse), part.sum)
    return entropy.reshape(batch)


def _joined(
    lse: Array, entropy: Array, peak: Array, total: Callable[[PyTree], PyTree]
) -> tuple[Array, Array]:
    """Combines `logsumexp` and entropy of the parts into those of the whole vocabulary.

    By the chain rule, the entropy of the whole is the entropy of which part an entry is
    in, plus the mean of the entropies within the parts. This avoids cancellation of
    large terms.
    """
    is_some = ~jnp.isneginf(lse)
    # The inner `where` keeps -inf - -inf = NaN out of values and gradients: a part of
    # padding alone has lse = -inf.
    below = jnp.where(is_some, lse - peak, 0)
    exp = jnp.where(is_some, jnp.exp(below), 0)
    weighted = jnp.where(is_some, exp * (entropy - below), 0)
    exp, weighted = total((exp, weighted))
    return peak + jnp.log(exp), jnp.log(exp) + weighted / exp


def _of_rank(part: Part, logits: Array) -> tuple[Array, Array]:
    """Returns the `logsumexp` of a rank's logits, and the entropy of their softmax."""
    lse, entropy = over_chunks(part, logits, _of_chunk)
    peak = lse.max(0, keepdims=True)
    total = functools.partial(jax.tree.map, lambda x: x.sum(0, keepdims=True))
    lse, entropy = _joined(lse, entropy, peak, total)
    return lse[0], entropy[0]


def _of_chunk(chunk: Chunk, logits: Array) -> tuple[Array, Array]:
    logits = jnp.where(chunk.counts & chunk.is_new, logits, -jnp.inf)
    lse = jax.nn.logsumexp(logits, axis=-1)
    return lse, -_p_log_p(logits, lse).sum(-1)


def _p_log_p(logits: Array, lse: Array) -> Array:
    log_p = logits - lse[:, None]
    return jnp.where(jnp.isneginf(logits), 0, jnp.exp(log_p) * log_p)


def _forward(part: Part, logits):
    lse, entropy = _of_rank(part, logits)
    return (lse, entropy), (logits, lse, entropy)


def _backward(part: Part, saved, grads):
    logits, lse, entropy = saved
    of_lse, of_entropy = grads
    chunk = chunk_of(part, logits.shape[1], 1, 0)
    log_p = in_float32(logits) - lse[:, None]
    has_some = chunk.counts & ~jnp.isneginf(logits)
    log_p = jnp.where(has_some, log_p, -jnp.inf)
    inner = jnp.where(has_some, log_p + entropy[:, None], 0)
    grad = jnp.exp(log_p) * (of_lse[:, None] - of_entropy[:, None] * inner)
    return (grad.astype(logits.dtype),)


_differentiable = jax.custom_vjp(_of_rank, nondiff_argnums=(0,))
_differentiable.defvjp(_forward, _backward)
