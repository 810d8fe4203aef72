"""What a cross entropy needs of a rank's logits: a few sums a token, and back."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fsdp_jax.ops.vocab._chunked import Chunk
from fsdp_jax.ops.vocab._shard import Part

Logits = Float[Array, "tokens chunk"]
PerToken = Float[Array, " tokens"]


class TokenSums(NamedTuple):
    """Of a rank's logits, or of a chunk of them.

    Attributes:
      lse: The logarithm of the sum of the exponentials; minus infinity of padding.
      target: The target's logit; 0 where it is elsewhere.
      all: The sum, or None where there is no smoothing, which alone needs it.
    """

    lse: PerToken
    target: PerToken
    all: PerToken | None


def sums_of_chunk(
    chunk: Chunk, logits: Logits, targets: Int[Array, " tokens"], is_smoothed: bool
) -> TokenSums:
    """Sums the logits of a chunk, without those that an earlier chunk has."""
    is_mine = chunk.counts & chunk.is_new
    is_target = is_mine & (chunk.columns == targets[:, None])
    return TokenSums(
        jax.nn.logsumexp(jnp.where(is_mine, logits, -jnp.inf), axis=-1),
        jnp.where(is_target, logits, 0).sum(-1),
        jnp.where(is_mine, logits, 0).sum(-1) if is_smoothed else None,
    )


def sums_of_chunks(sums: TokenSums) -> TokenSums:
    """Puts the sums of chunks, stacked on the first dim, together."""
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
    """The gradient of a chunk's logits, also of those that an earlier chunk has.

    Args:
      chunk: Which entries of the vocabulary they are of.
      logits: The same as in forward.
      targets: As in forward.
      lse: Of all chunks of the rank.
      grads: Of what `sums_of_chunks` returned.

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
) -> PerToken:
    """The losses, from the sums of all ranks; NaN where a target is no entry."""
    peak = part.max(sums.lse)
    exp, target, everything = part.sum(sums._replace(lse=jnp.exp(sums.lse - peak)))
    loss = peak + jnp.log(exp) - (1 - label_smoothing) * target
    if everything is not None:
        loss -= label_smoothing / part.vocab_size * everything
    is_known = (targets >= 0) & (targets < part.vocab_size)
    return jnp.where(is_known, loss, jnp.nan)


def check_smoothing(label_smoothing: float) -> None:
    """Raises a `ValueError` unless it is a part of one."""
    if not 0 <= label_smoothing < 1:
        raise ValueError(
            f"label_smoothing={label_smoothing}: it is how much of a target is spread "
            "over the vocabulary, from 0 to less than 1."
        )
