"""Causal attention on full sequences: the default of the decoder."""

from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from bridge.models._cudnn import cudnn_attention

Window = int | Int[Array, ""] | None


class Attention(Protocol):
    """Signature of the decoder's attention: causal, grouped heads, packed rows."""

    def __call__(
        self,
        query: Float[Array, "batch seq heads head_dim"],
        key: Float[Array, "batch seq kv_heads head_dim"],
        value: Float[Array, "batch seq kv_heads v_head_dim"],
        *,
        scale: float,
        segment_ids: Int[Array, "batch seq"] | None = None,
        window: Window = None,
        softcap: float | None = None,
        sinks: Float[Array, " heads"] | None = None,
    ) -> Float[Array, "batch seq heads v_head_dim"]:
        """Attends from each query to keys of its segment, up to its own position."""
        ...


def dot_product_attention(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq kv_heads head_dim"],
    value: Float[Array, "batch seq kv_heads v_head_dim"],
    *,
    scale: float,
    segment_ids: Int[Array, "batch seq"] | None = None,
    window: Window = None,
    softcap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
) -> Float[Array, "batch seq heads v_head_dim"]:
    """Computes causal attention with a float32 softmax.

    Query head `i` attends to key head `i // (heads / kv_heads)`, as in Hugging Face.
    Uses cuDNN's fused kernel where the devices of the mesh support it, present or not,
    otherwise XLA's implementation, which materializes scores `[batch, heads, seq,
    seq]`.

    Args:
      query: Queries, with rotary embedding applied.
      key: Keys, with rotary embedding applied.
      value: Values.
      scale: Factor of the scores, usually `head_dim ** -0.5`.
      segment_ids: Segment of each token in a packed row: queries attend only to keys
        of their own segment. None means one segment per row.
      window: Number of tokens that a query attends to, including its own; an array if
        it differs between layers; None for all previous tokens.
      softcap: Bound of the scores, applied as `softcap * tanh(scores / softcap)`;
        None for no bound.
      sinks: Score per head that takes part in the softmax but has no value; None for
        no sinks.

    Returns:
      Average of the values for each query, weighted by the softmax.
    """
    bent = softcap is not None or sinks is not None
    if bent or query.shape[-1] != value.shape[-1] or _is_half_on_cpu(query):
        mask = _visible(query.shape[1], segment_ids, window)
        return attend(query, key, value, scale, mask, softcap, sinks)
    # A static window is passed as `local_window_size`; a traced one needs a mask.
    static = isinstance(window, int)
    mask = None
    if segment_ids is not None or not (static or window is None):
        mask = _visible(query.shape[1], segment_ids, window)
    implementation = _implementation(query)
    if implementation == "cudnn" and jax.devices()[0].platform != "gpu":
        fixed = window if static else None
        return cudnn_attention(query, key, value, scale=scale, mask=mask, window=fixed)
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        mask=mask,
        scale=scale,
        is_causal=True,
        local_window_size=(window - 1, 0) if isinstance(window, int) else None,
        implementation=implementation,
    )


def attend(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch keys kv_heads head_dim"],
    value: Float[Array, "batch keys kv_heads v_head_dim"],
    scale: float,
    mask: Bool[Array, "#batch 1 seq keys"],
    softcap: float | None,
    sinks: Float[Array, " heads"] | None,
) -> Float[Array, "batch seq heads v_head_dim"]:
    """Computes attention with features that `jax.nn.dot_product_attention` lacks.

    These are soft caps, sinks, and values of another width than keys.

    Args:
      query: Queries, with rotary embedding applied.
      key: Keys, possibly more than queries.
      value: Values.
      scale: Factor of the scores.
      mask: True where a query attends to a key; at least one key per query.
      softcap: Bound of the scores; None for no bound.
      sinks: Score per head that takes part in the softmax; None for no sinks.

    Returns:
      Average of the values for each query, weighted by the softmax.

    Source: transformers `modeling_gemma2.py::eager_attention_forward`,
      `modeling_gpt_oss.py::eager_attention_forward`.
    """
    batch, seq, heads, _ = query.shape
    kv_heads = key.shape[2]
    grouped = query.reshape(batch, seq, kv_heads, heads // kv_heads, -1)
    wide = jnp.promote_types(query.dtype, jnp.float32)
    scores = scale * jnp.einsum(
        "bqgrd,bkgd->bgrqk", grouped, key, preferred_element_type=wide
    )
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    visible = jnp.broadcast_to(mask[:, :, None], scores.shape)
    scores = jnp.where(visible, scores, jnp.finfo(wide).min)
    if sinks is not None:
        column = sinks.astype(wide).reshape(1, kv_heads, heads // kv_heads, 1, 1)
        column = jnp.broadcast_to(column, (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, column], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : key.shape[1]].astype(value.dtype)
    mixed = jnp.einsum("bgrqk,bkgd->bqgrd", weights, value)
    return mixed.reshape(batch, seq, heads, -1)


def _visible(
    seq: int, segment_ids: Int[Array, "batch seq"] | None, window: Window
) -> Bool[Array, "#batch 1 seq seq"]:
    """Returns the mask of keys that each query attends to."""
    rows = jnp.arange(seq, dtype=jnp.int32)
    behind = rows[:, None] - rows[None, :]
    mask = behind >= 0
    if window is not None:
        mask &= behind < window
    mask = mask[None, None]
    if segment_ids is None:
        return mask
    same = jnp.equal(segment_ids[:, None, :, None], segment_ids[:, None, None, :])
    return jnp.logical_and(*jnp.broadcast_arrays(mask, same))


def _is_half_on_cpu(query: Array) -> bool:
    # jax's implementation requests the dot algorithm F16_F16_F32, which XLA's CPU
    # backend does not support.
    return query.dtype == jnp.float16 and _target().platform == "cpu"


def _target() -> Any:
    """Returns the device that is traced for: that of the mesh, if there is one.

    A step is planned on meshes of GPUs that are not here, and runs their kernels.
    """
    return jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]


def _implementation(query: Array) -> Literal["cudnn", "xla"]:
    # cuDNN's flash attention requires half precision and a head_dim of 8, 16, ...,
    # 128; jax raises otherwise instead of falling back.
    device = _target()
    nvidia = device.platform == "gpu" and device.device_kind.startswith("NVIDIA")
    half = query.dtype in (jnp.bfloat16, jnp.float16)
    head_dim = query.shape[-1]
    fits = head_dim % 8 == 0 and head_dim <= 128
    return "cudnn" if nvidia and half and fits else "xla"
