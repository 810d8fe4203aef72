"""Fused linear layer and cross entropy, which computes logits one chunk at a time."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from fsdp_jax.ops.vocab._chunked import (
    CHUNK,
    Chunk,
    chunk_of,
    chunk_width,
    in_float32,
    num_chunks,
)
from fsdp_jax.ops.vocab._shard import Part, on_each_part
from fsdp_jax.ops.vocab._token_sums import (
    TokenSums,
    check_weights,
    grad_of_logits,
    loss_of_sums,
    sums_of_chunk,
    sums_of_chunks,
)


def fused_linear_cross_entropy(
    hidden: Float[Array, "*batch embed"],
    kernel: Float[Array, "embed vocab"],
    targets: Int[Array, "*batch"],
    *,
    chunk: int = CHUNK,
    axis: str = "tp",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    vocab_size: int | None = None,
    logit_fn: Callable[[Array], Array] | None = None,
) -> Float[Array, "*batch"]:
    """Computes `vocab_parallel_cross_entropy(hidden @ kernel, targets)` in chunks.

    The product is computed for `chunk` entries of the vocabulary at a time, and again
    in the backward pass, which adds a third to its work. Peak memory is
    `tokens * chunk` logits, in float32 and once in the dtype of the kernel, and the two
    gradients, for any vocabulary size. Chunks are of the vocabulary and not of tokens,
    so that each part of the kernel's gradient is computed once: chunks of tokens would
    have to be summed in a float32 array of the kernel's size.

    The kernel has the layout of its unit: unsharded over data axes, gathered once
    outside of the loop, and possibly split over `axis`.

    Args:
      hidden: Inputs of the head.
      kernel: Weight of the head. For a tied embedding pass its transpose; its gradient
        is then transposed back, which takes memory for one more.
      targets: Indices into the whole vocabulary, as in `vocab_parallel_cross_entropy`.
      chunk: Maximum number of vocabulary entries per chunk, on each rank. If it does
        not divide the vocabulary, all chunks are slightly smaller.
      axis: Mesh axis over which the `vocab` dim of the kernel may be split.
      label_smoothing: Fraction of each target spread evenly over the vocabulary, as in
        `vocab_parallel_cross_entropy`.
      z_loss: Weight of the squared log of the sum of exponentials, as in
        `vocab_parallel_cross_entropy`.
      vocab_size: Number of entries that count, as in `vocab_parallel_cross_entropy`.
      logit_fn: Elementwise function of the float32 logits, e.g. a soft cap. It may not
        close over differentiated values.

    Returns:
      The losses, float32, not averaged.

    Raises:
      ValueError: If the vocabulary does not divide over `axis`, or is smaller than
        `vocab_size`, or `label_smoothing` is not in [0, 1), or `z_loss` is negative, or
        `chunk` is less than 1.

    Source: Liger-Kernel `fused_linear_cross_entropy` (over tokens, gradients in
      forward, so for a mean alone); Apple's cut cross entropy, arXiv 2411.09009.
    """
    check_weights(label_smoothing, z_loss)
    if chunk < 1:
        raise ValueError(f"chunk={chunk} must be at least 1 entry of the vocabulary.")
    local = functools.partial(_loss, chunk, (label_smoothing, z_loss), logit_fn)
    return on_each_part(
        local,
        (hidden, kernel, targets),
        (None, 1, None),
        axis=axis,
        vocab_size=vocab_size,
    )


@dataclasses.dataclass(frozen=True)
class _Head:
    """Static parameters of a rank's head: its part, chunking and logit function.

    Attributes:
      part: Part of the vocabulary of this rank.
      chunk: Maximum number of entries per chunk.
      is_smoothed: Whether the sum of all logits is needed.
      logit_fn: Elementwise function of the logits.
    """

    part: Part
    chunk: int
    is_smoothed: bool
    logit_fn: Callable[[Array], Array]

    def product(
        self, hidden: Array, kernel: Array, index: Array
    ) -> tuple[Chunk, Array, Array]:
        """Returns a chunk, its slice of the kernel, and logits before `logit_fn`."""
        size = kernel.shape[1]
        number = num_chunks(size, self.chunk)
        chunk = chunk_of(self.part, size, number, index)
        width = chunk_width(size, number)
        piece = lax.dynamic_slice_in_dim(kernel, chunk.start, width, axis=1)
        return chunk, piece, _matmul(hidden, piece)

    def indices(self, kernel: Array) -> Array:
        """Returns the indices of all chunks."""
        return jnp.arange(num_chunks(kernel.shape[1], self.chunk))


def _loss(
    chunk: int,
    weights: tuple[float, float],
    logit_fn: Callable[[Array], Array] | None,
    part: Part,
    hidden: Array,
    kernel: Array,
    targets: Array,
) -> Array:
    label_smoothing, _ = weights
    head = _Head(part, chunk, label_smoothing > 0, logit_fn or _as_they_are)
    flat = targets.reshape(-1)
    rows = hidden.reshape(flat.size, hidden.shape[-1])
    sums = _differentiable_sums(head, rows, kernel, flat)
    return loss_of_sums(part, sums, flat, *weights).reshape(targets.shape)


def _sums(head: _Head, hidden: Array, kernel: Array, targets: Array) -> TokenSums:
    def of_chunk(index):
        chunk, _, product = head.product(hidden, kernel, index)
        logits = head.logit_fn(product)
        return sums_of_chunk(chunk, logits, targets, head.is_smoothed)

    return sums_of_chunks(lax.map(of_chunk, head.indices(kernel)))


def _sums_forward(head: _Head, hidden, kernel, targets):
    sums = _sums(head, hidden, kernel, targets)
    return sums, (hidden, kernel, targets, sums.lse)


def _sums_backward(head: _Head, saved, grads: TokenSums):
    hidden, kernel, targets, lse = saved

    def add_chunk(carry, index):
        grad_hidden, grad_kernel = carry
        chunk, piece, product = head.product(hidden, kernel, index)
        logits, pull = jax.vjp(head.logit_fn, product)
        (grad,) = pull(grad_of_logits(chunk, logits, targets, lse, grads))
        grad = grad.astype(kernel.dtype)
        # grad_hidden sums over chunks, so that entries in two chunks must count once.
        grad_hidden += _matmul(jnp.where(chunk.is_new, grad, 0), piece.T)
        # Where the last chunk overlaps the one before, it writes the same values again.
        of_piece = _matmul(hidden.T, grad).astype(kernel.dtype)
        grad_kernel = lax.dynamic_update_slice_in_dim(
            grad_kernel, of_piece, chunk.start, axis=1
        )
        return (grad_hidden, grad_kernel), None

    zeros = jnp.zeros_like(in_float32(hidden)), jnp.zeros_like(kernel)
    (grad_hidden, grad_kernel), _ = lax.scan(add_chunk, zeros, head.indices(kernel))
    return grad_hidden.astype(hidden.dtype), grad_kernel, None


_differentiable_sums = jax.custom_vjp(_sums, nondiff_argnums=(0,))
_differentiable_sums.defvjp(_sums_forward, _sums_backward)


def _matmul(a: Array, b: Array) -> Array:
    """Returns the product, accumulated and returned in float32 at least."""
    wide = jnp.promote_types(jnp.result_type(a, b), jnp.float32)
    return jnp.matmul(a, b, preferred_element_type=wide)


def _as_they_are(logits: Array) -> Array:
    return logits
