"""Attention by a fused kernel: one softmax, and sinks, around its two passes."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from bridge.models._attention_kernel import AttentionKernel
from bridge.models._kernel_mask import Mask, Scores, Tokens

# `fsdp_jax.ops` gives the residuals of context-parallel attention the same name, so
# that one `remat_policy` saves both. Neither package imports the other: a test compares
# them.
RESIDUALS = "context_attention"
"""`checkpoint_name` of the forward results that the backward pass needs."""

Sinks = Float[Array, " heads"] | None
Window = int | Int[Array, ""] | None


class _Seen(NamedTuple):
    """Traced arguments that have no gradient."""

    tokens: Tokens
    window: Int[Array, ""] | None


def fused_attention(
    kernel: AttentionKernel,
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq kv_heads head_dim"],
    value: Float[Array, "batch seq kv_heads v_head_dim"],
    *,
    scale: float,
    segment_ids: Int[Array, "batch seq"] | None = None,
    window: Window = None,
    softcap: float | None = None,
    sinks: Sinks = None,
) -> Float[Array, "batch seq heads v_head_dim"]:
    """Computes causal attention over whole rows by a fused kernel.

    Sinks change the log-sum-exp, and through it the output: kernels need not know them.
    Given the changed log-sum-exp, their backward pass is that of the softmax with
    sinks. The residuals are named `context_attention` for a `remat_policy`.

    Args:
      kernel: Kernel, such as `FlashKernel`.
      query: Queries.
      key: Keys.
      value: Values.
      scale: Factor of the scores.
      segment_ids: Segment of each token; None for one per row.
      window: Tokens that a query sees, its own included; None for all before it.
      softcap: Bound of the scores; None for none.
      sinks: Scores per head without a value; None for none.
    """
    batch, seq, _, _ = query.shape
    row = jnp.arange(seq, dtype=jnp.int32)
    tokens = Tokens(jnp.broadcast_to(row, (batch, seq)), segment_ids)
    static, traced = split_window(window)
    how = (kernel, Scores(scale, softcap), static)
    return _attend(how, query, key, value, sinks, _Seen(tokens, traced))


def split_window(window: Window) -> tuple[int | None, Int[Array, ""] | None]:
    """Returns the window as a static number or as a traced one; the other is None."""
    return (window, None) if isinstance(window, int) else (None, window)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(how: Any, query: Array, key: Array, value: Array, sinks: Sinks, at: Any):
    return _forward(how, query, key, value, sinks, at)[0]


def _forward(how: Any, query: Array, key: Array, value: Array, sinks: Sinks, at: Any):
    kernel, scores, window = how
    mask = Mask(at.tokens, at.tokens, causal=True)
    window = at.window if window is None else window
    out, log_sum = kernel.forward(query, key, value, scores, mask, window)
    if sinks is not None:
        with_sinks = jnp.logaddexp(log_sum, sinks.astype(jnp.float32)[None, :, None])
        part = jnp.exp(log_sum - with_sinks).swapaxes(1, 2)[..., None]
        out, log_sum = (out * part).astype(out.dtype), with_sinks
    out, log_sum = (checkpoint_name(x, RESIDUALS) for x in (out, log_sum))
    return out, (query, key, value, sinks, at, out, log_sum)


def _backward(how: Any, saved: Any, grad: Array):
    kernel, scores, window = how
    query, key, value, sinks, at, out, log_sum = saved
    mask = Mask(at.tokens, at.tokens, causal=True)
    window = at.window if window is None else window
    grads = kernel.backward(query, key, value, out, log_sum, grad, scores, mask, window)
    return *grads, _sinks_grad(sinks, out, log_sum, grad), None


def _sinks_grad(sinks: Sinks, out: Array, log_sum: Array, grad: Array) -> Sinks:
    if sinks is None:
        return None
    wide = (x.astype(jnp.float32) for x in (out, grad))
    delta = jnp.einsum("bqhd,bqhd->bhq", *wide)
    # d sink = -sum(softmax weight of the sink * delta), delta = <out, d_out>: the sink
    # has no value.
    weights = jnp.exp(sinks.astype(jnp.float32)[None, :, None] - log_sum)
    return -(weights * delta).sum((0, 2)).astype(sinks.dtype)


_attend.defvjp(_forward, _backward)
