"""Causal attention on whole sequences: the plain default of the decoder."""

from typing import Literal, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Attention(Protocol):
    """What the decoder asks of an attention: causal, grouped heads, packed rows."""

    def __call__(
        self,
        query: Float[Array, "batch seq heads head_dim"],
        key: Float[Array, "batch seq kv_heads head_dim"],
        value: Float[Array, "batch seq kv_heads head_dim"],
        *,
        scale: float,
        segment_ids: Int[Array, "batch seq"] | None = None,
    ) -> Float[Array, "batch seq heads head_dim"]:
        """Attends from each query to the keys at and before it, in its segment."""
        ...


def dot_product_attention(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq kv_heads head_dim"],
    value: Float[Array, "batch seq kv_heads head_dim"],
    *,
    scale: float,
    segment_ids: Int[Array, "batch seq"] | None = None,
) -> Float[Array, "batch seq heads head_dim"]:
    """Attends causally, with a float32 softmax.

    Query head `i` reads key head `i // (heads / kv_heads)`, as Hugging Face lays
    them out. cuDNN's fused kernel is used where it runs; elsewhere XLA's form, which
    holds `[batch, heads, seq, seq]` scores.

    Args:
      query: Queries, rotary embedding applied.
      key: Keys, rotary embedding applied.
      value: Values.
      scale: Multiplies the scores, `head_dim ** -0.5` as a rule.
      segment_ids: Texts packed in one row see only themselves; None means one text
        a row.

    Returns:
      For each query the mean of the values it attends to.
    """
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        mask=None if segment_ids is None else _same_segment(segment_ids),
        scale=scale,
        is_causal=True,
        implementation=_implementation(query),
    )


def _same_segment(
    segment_ids: Int[Array, "batch seq"],
) -> Array:
    return jnp.equal(segment_ids[:, None, :, None], segment_ids[:, None, None, :])


def _implementation(query: Array) -> Literal["cudnn", "xla"]:
    # cuDNN's flash attention takes half precision and heads of 8, 16, ..., 128; jax
    # raises on anything else instead of falling back.
    device = jax.devices()[0]
    nvidia = device.platform == "gpu" and device.device_kind.startswith("NVIDIA")
    half = query.dtype in (jnp.bfloat16, jnp.float16)
    head_dim = query.shape[-1]
    fits = head_dim % 8 == 0 and head_dim <= 128
    return "cudnn" if nvidia and half and fits else "xla"
