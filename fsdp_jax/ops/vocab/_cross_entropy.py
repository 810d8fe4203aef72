"""Cross entropy and log-probabilities of logits whose vocabulary is split over `tp`."""

from __future__ import annotations

import functools

import jax
from jaxtyping import Array, Float, Int

from fsdp_jax.ops.vocab._chunked import chunk_of, in_float32, over_chunks
from fsdp_jax.ops.vocab._shard import Part, on_each_part
from fsdp_jax.ops.vocab._token_sums import (
    TokenSums,
    check_weights,
    grad_of_logits,
    loss_of_sums,
    sums_of_chunk,
    sums_of_chunks,
)


def vocab_parallel_cross_entropy(
    logits: Float[Array, "*batch vocab"],
    targets: Int[Array, "*batch"],
    *,
    axis: str = "tp",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    vocab_size: int | None = None,
) -> Float[Array, "*batch"]:
    """Computes each token's cross entropy without gathering the split logits.

    Only a few numbers per token are communicated over `axis`, a maximum and sums, all
    in the forward pass. The residuals are the logits in their own dtype, and nothing
    else of their size.

    In a training step, or under `jax.set_mesh`, `axis` is automatic and all shapes are
    global. In a `shard_map` that is manual over it, each rank passes its part of the
    vocabulary, in order, and gradients are those of `jax.lax.psum`. Without such an
    axis it is the same function of unsharded logits.

    Args:
      logits: Logits of any floating dtype; sums are in float32.
      targets: Indices into the whole vocabulary. One outside of `vocab_size` has the
        loss NaN, and no gradient where that is masked out as `masked_mean` does it.
      axis: Mesh axis that splits the vocabulary.
      label_smoothing: Fraction of each target spread evenly over the vocabulary, the
        target itself included, as in optax and torch; Megatron spreads over the others,
        `label_smoothing * K / (K - 1)` here.
      z_loss: Weight of the squared log of the sum of exponentials, added to each loss,
        which keeps logits from drifting (PaLM, arXiv 2204.02311).
      vocab_size: Number of entries that count, if those after them are padding: padding
        is neither summed nor smoothed over. Default all.

    Returns:
      The losses, float32, not averaged.

    Raises:
      ValueError: If the vocabulary does not divide over `axis`, or is smaller than
        `vocab_size`, or `label_smoothing` is not in [0, 1), or `z_loss` is negative.

    Source: Megatron-LM `tensor_parallel/cross_entropy.py`, which overwrites the logits,
      and smooths over each rank's own part, so that ranks disagree.
    """
    check_weights(label_smoothing, z_loss)
    local = functools.partial(_loss, (label_smoothing, z_loss))
    return on_each_part(
        local,
        (logits, targets),
        (logits.ndim - 1, None),
        axis=axis,
        vocab_size=vocab_size,
    )


def vocab_parallel_log_probs(
    logits: Float[Array, "*batch vocab"],
    targets: Int[Array, "*batch"],
    *,
    axis: str = "tp",
    vocab_size: int | None = None,
) -> Float[Array, "*batch"]:
    """Computes the log-probability of each target: minus its cross entropy.

    Args:
      logits: Logits, as in `vocab_parallel_cross_entropy`.
      targets: Indices into the whole vocabulary.
      axis: Mesh axis that splits the vocabulary.
      vocab_size: Number of entries that count. Default all.

    Returns:
      The log-probabilities, float32.

    Source: verl `megatron/tensor_parallel.py::vocab_parallel_log_probs_from_logits`.
    """
    return -vocab_parallel_cross_entropy(
        logits, targets, axis=axis, vocab_size=vocab_size
    )


def _loss(
    weights: tuple[float, float], part: Part, logits: Array, targets: Array
) -> Array:
    label_smoothing, _ = weights
    flat = targets.reshape(-1)
    rows = logits.reshape(flat.size, logits.shape[-1])
    sums = _differentiable_sums(part, label_smoothing > 0, rows, flat)
    return loss_of_sums(part, sums, flat, *weights).reshape(targets.shape)


def _sums(part: Part, is_smoothed: bool, logits: Array, targets: Array) -> TokenSums:
    return sums_of_chunks(
        over_chunks(
            part,
            logits,
            lambda chunk, piece: sums_of_chunk(chunk, piece, targets, is_smoothed),
        )
    )


def _sums_forward(part: Part, is_smoothed: bool, logits, targets):
    sums = _sums(part, is_smoothed, logits, targets)
    return sums, (logits, targets, sums.lse)


def _sums_backward(part: Part, is_smoothed: bool, saved, grads: TokenSums):
    logits, targets, lse = saved
    everything = chunk_of(part, logits.shape[1], 1, 0)
    grad = grad_of_logits(everything, in_float32(logits), targets, lse, grads)
    return grad.astype(logits.dtype), None


# The residuals are the logits and nothing else of their size: autodiff of the sums
# would save the exponentials, in float32.
_differentiable_sums = jax.custom_vjp(_sums, nondiff_argnums=(0, 1))
_differentiable_sums.defvjp(_sums_forward, _sums_backward)
