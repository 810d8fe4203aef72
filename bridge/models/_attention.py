"""Causal attention on full sequences: the default of the decoder."""

from typing import Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from bridge.models._attention_choice import (
    Accelerator,
    AttentionShape,
    ContextForm,
    WantedKernel,
    choose_attention,
)
from bridge.models._cudnn import CudnnKernel
from bridge.models._flash_kernel import FlashKernel
from bridge.models._fused_attention import Window, fused_attention, split_window


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
    kernel: WantedKernel = "auto",
) -> Float[Array, "batch seq heads v_head_dim"]:
    """Computes causal attention with a float32 softmax.

    Query head `i` attends to key head `i // (heads / kv_heads)`, as in Hugging Face.
    The kernel is that of `choose_attention` for the devices of the mesh, present or
    not: cuDNN's, else the flash kernel of this package, else XLA's operations, which
    materialize scores `[batch, heads, seq, seq]`.

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
      kernel: Kernel to use; auto for the first of cudnn, flash and xla that the device
        can run.

    Returns:
      Average of the values for each query, weighted by the softmax.

    Raises:
      ValueError: If the device cannot run the kernel asked for.
    """
    features = {"segment_ids": segment_ids, "window": window, "softcap": softcap}
    if fused := kernel_of_call(query, value, **features, kernel=kernel):
        return fused_attention(
            fused, query, key, value, scale=scale, sinks=sinks, **features
        )
    is_unsupported_by_jax = (
        softcap is not None
        or sinks is not None
        or query.shape[-1] != value.shape[-1]
        or _is_half_on_cpu(query)
    )
    if is_unsupported_by_jax:
        mask = causal_mask(query.shape[1], segment_ids, window)
        return attend(query, key, value, scale, mask, softcap, sinks)
    # A static window is passed as `local_window_size`; a traced one needs a mask.
    static, traced = split_window(window)
    mask = None
    if segment_ids is not None or traced is not None:
        mask = causal_mask(query.shape[1], segment_ids, window)
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        mask=mask,
        scale=scale,
        is_causal=True,
        local_window_size=None if static is None else (static - 1, 0),
        implementation="xla",
    )


def kernel_of_call(
    query: Float[Array, "batch seq heads head_dim"],
    value: Float[Array, "batch seq kv_heads v_head_dim"],
    *,
    segment_ids: Int[Array, "batch seq"] | None = None,
    window: Window = None,
    softcap: float | None = None,
    context: ContextForm | None = None,
    kernel: WantedKernel = "auto",
) -> CudnnKernel | FlashKernel | None:
    """Returns the fused kernel for a call of attention on the devices of the mesh.

    Args:
      query: Queries.
      value: Values.
      segment_ids: Segment of each token in a packed row; None for one per row.
      window: Tokens that a query sees; None for all before it.
      softcap: Bound of the scores; None for none.
      context: Context-parallel algorithm around the kernel; None for whole rows.
      kernel: Kernel to use, as for `choose_attention`.

    Returns:
      The kernel; None for XLA's operations.

    Raises:
      ValueError: If the devices cannot run the kernel asked for.
    """
    static, traced = split_window(window)
    shape = AttentionShape(
        query.shape[-1],
        value.shape[-1],
        query.dtype,
        window=static if traced is None else "traced",
        softcap=softcap is not None,
        packed=segment_ids is not None,
        context=context,
    )
    choice = choose_attention(shape, Accelerator.current(), kernel)
    return {"cudnn": CudnnKernel(), "flash": FlashKernel(), "xla": None}[choice.kernel]


def attend(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch keys kv_heads head_dim"],
    value: Float[Array, "batch keys kv_heads v_head_dim"],
    scale: float,
    mask: Bool[Array, "#batch #kv_heads seq keys"],
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
      mask: True where a query attends to a key, by key heads or of all; at least one
        key per query.
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
    mask = jnp.broadcast_to(mask[:, :, None], scores.shape)
    scores = jnp.where(mask, scores, jnp.finfo(wide).min)
    if sinks is not None:
        column = sinks.astype(wide).reshape(1, kv_heads, heads // kv_heads, 1, 1)
        column = jnp.broadcast_to(column, (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, column], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : key.shape[1]].astype(value.dtype)
    out = jnp.einsum("bgrqk,bkgd->bqgrd", weights, value)
    return out.reshape(batch, seq, heads, -1)


def causal_mask(
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
    return query.dtype == jnp.float16 and Accelerator.current().kind == "cpu"
