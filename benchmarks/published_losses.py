"""Losses of published runs: fused by XLA, or as PyTorch has them without a compiler."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def cross_entropy(logits, labels):
    """Mean cross entropy, fused as XLA likes."""
    logits = logits.astype(jnp.float32)
    picked = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)


@jax.custom_vjp
def eager_cross_entropy(logits, labels):
    """Mean cross entropy by `torch.nn.functional.cross_entropy(logits.float(), ...)`.

    Without a compiler the copy in float32, the logarithms of probabilities, and the
    gradient of each of both are arrays in memory. The logits and their copy are freed
    before backward; but of the hole that they leave, of one and a half such arrays,
    PyTorch's allocator can give only one of the two gradients, and reserves new memory
    for the other. The half that is wasted is as large as the logits, which are kept
    here in its place: what is published is the memory that was reserved.
    """
    return _eager_forward(logits, labels)[0]


def _eager_forward(logits, labels):
    # Barriers, as XLA would fuse one kernel of all.
    wide = lax.optimization_barrier(logits.astype(jnp.float32))
    log_probs = lax.optimization_barrier(jax.nn.log_softmax(wide))
    picked = jnp.take_along_axis(log_probs, labels[..., None], -1)
    return -jnp.mean(picked), (logits, log_probs, labels)


def _eager_backward(saved, g):
    logits, log_probs, labels = saved
    columns = lax.broadcasted_iota(labels.dtype, log_probs.shape, log_probs.ndim - 1)
    is_label = columns == labels[..., None]
    of_log_probs = jnp.where(is_label, -g / labels.size, 0.0)
    of_log_probs = lax.optimization_barrier(of_log_probs)
    total = jnp.sum(of_log_probs, -1, keepdims=True)
    of_wide = lax.optimization_barrier(of_log_probs - jnp.exp(log_probs) * total)
    of_wide = _beside(of_wide, of_log_probs, log_probs, logits)
    return of_wide.astype(jnp.bfloat16), None


def _beside(made, *arrays):
    """Returns `made`, which XLA cannot write over any of the arrays.

    An element of each is read, at a place that an element of `made` decides.
    """
    start = (0,) * made.ndim
    first = lax.dynamic_slice(made, start, (1,) * made.ndim)
    place = (jnp.int32(first.ravel()[0] > 1), *start[1:])
    read = [lax.dynamic_slice(a, place, first.shape).astype(made.dtype) for a in arrays]
    return lax.dynamic_update_slice(made, first + 0.0 * sum(read), start)


eager_cross_entropy.defvjp(_eager_forward, _eager_backward)

LOSSES = {"fused": cross_entropy, "eager": eager_cross_entropy}
