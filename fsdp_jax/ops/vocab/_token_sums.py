"""Per-token sums over logits that a cross entropy needs, and their gradients."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fsdp_jax.ops.vocab._chunked import Chunk
from fsdp_jax.ops.vocab._shard import Part

Logits = Float[Array, "tokens chunk"]
PerToken = Float[Array, " tokens"]


class TokenSums(NamedTuple):
    """Per-token sums over a rank's logits, or over a chunk of them.

    Attributes:
      lse: Log of the sum of exponentials; minus infinity if all entries are padding.
      target: Logit of the target; 0 if it is in another part.
      all: Sum of all logits; None without label smoothing, which alone needs it.
    """

    lse: PerToken
    target: PerToken
    all: PerToken | None


def sums_of_chunk(
    chunk: Chunk, logits: Logits, targets: Int[Array, " tokens"], is_smoothed: bool
) -> TokenSums:
    """Sums the logits of a chunk, without entries that are in an earlier chunk."""
    is_mine = chunk.counts & chunk.is_new
    is_target = is_mine & (chunk.columns == targets[:, None])
    return TokenSums(
        jax.nn.logsumexp(jnp.where(is_mine, logits, -jnp.inf), axis=-1),
        jnp.where(is_target, logits, 0).sum(-1),
        jnp.where(is_mine, logits, 0).sum(-1) if is_smoothed else None,
    )


def sums_of_chunks(sums: TokenSums) -> TokenSums:
    """Combines the sums of chunks, stacked on the first dim."""
    return TokenSums(
        jax.nn.logsumexp(sums.lse, axis=0),
        sums.target.sum(0),
        None if sums.all is None else sums.all.sum(0),
    )


def grad_of_logits(
    chunk: Chunk,
    logits: Logits,
    targets: Int[Array, " tokens"],
    lse: PerToken,
    grads: TokenSums,
) -> Logits:
    """Returns the gradient of a chunk's logits, including entries of earlier chunks.

    Args:
      chunk: Entries of the vocabulary that the logits are for.
      logits: Logits, as in the forward pass.
      targets: Target indices, as in the forward pass.
      lse: Log-sum-exp over all chunks of the rank.
      grads: Cotangents of the result of `sums_of_chunks`.

    Returns:
      The gradient; 0 for padding, whatever its logits are.
    """
    grad = jnp.exp(logits - lse[:, None]) * grads.lse[:, None]
    grad += jnp.where(chunk.columns == targets[:, None], grads.target[:, None], 0)
    if grads.all is not None:
        grad += grads.all[:, None]
    return jnp.where(chunk.counts, grad, 0)


def loss_of_sums(
    part: Part,
    sums: TokenSums,
    targets: Int[Array, " tokens"],
    label_smoothing: float,
    z_loss: float,
) -> PerToken:
    """Computes the losses from the ranks' sums; NaN where a target is out of range."""
    # Without a gradient: the peak cancels out of the loss.
    peak = part.max(sums.lse)
    exp, target, everything = part.sum(sums._replace(lse=jnp.exp(sums.lse - peak)))
    lse = peak + jnp.log(exp)
    loss = lse - (1 - label_smoothing) * target
    if z_loss:
        loss += z_loss * lse**2
    if everything is not None:
        loss -= label_smoothing / part.vocab_size * everything
    is_known = (targets >= 0) & (targets < part.vocab_size)
    return jnp.where(is_known, loss, jnp.nan)


def check_weights(label_smoothing: float, z_loss: float) -> None:
    """Raises a `ValueError` for weights out of range."""
    if not 0 <= z_loss < math.inf:
        raise ValueError(f"z_loss={z_loss} must be finite and at least 0.")
    if not 0 <= label_smoothing < 1:
        raise ValueError(
            f"label_smoothing={label_smoothing} must be at least 0 and less than 1: it "
            "is the share of a target that is spread over the vocabulary."
        )
