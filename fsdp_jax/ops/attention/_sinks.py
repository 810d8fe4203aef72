"""Attention sinks: scores per head that take part in the softmax without a value."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float


def sinks_grad(
    sinks: Float[Array, "*heads"],
    log_sum: Float[Array, "*stats"],
    delta: Float[Array, "*stats"],
    query_dims: tuple[int, ...],
) -> Float[Array, "*heads"]:
    """Returns the gradient of the sinks.

    Args:
      sinks: Sinks, with the dims of `log_sum` that are not in `query_dims`.
      log_sum: Log-sum-exp of the scores and the sink of each query, float32 at least.
      delta: Inner product of output and cotangent of each query.
      query_dims: Dims of `log_sum` along which queries share a sink.
    """
    # d sink = -sum(softmax weight of the sink * delta), delta = <out, d_out>: the sink
    # has no value.
    wide = jnp.expand_dims(sinks.astype(log_sum.dtype), query_dims)
    weights = jnp.exp(wide - log_sum)
    return -(weights * delta).sum(query_dims).astype(sinks.dtype)
