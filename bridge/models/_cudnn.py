"""cuDNN's fused attention for a GPU that is not present, to compile a step for it."""

import inspect

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from bridge._compat import CUDNN_ATTENTION

ASSUMED_VERSION = 91000
"""Version of cuDNN on the absent GPU: 9.10, as in the target config of the planner."""


def cudnn_attention(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq kv_heads head_dim"],
    value: Float[Array, "batch seq kv_heads head_dim"],
    *,
    scale: float,
    mask: Bool[Array, "#batch 1 seq seq"] | None,
    window: int | None,
) -> Float[Array, "batch seq heads head_dim"]:
    """Calls causal attention of cuDNN without asking this machine for cuDNN.

    `jax.nn.dot_product_attention` asks the installed cuDNN for its version while the
    call is traced, and raises where there is none. Compiling for absent GPUs needs
    none: the kernel is a custom call. This calls what jax's function calls, with a
    version that is stated.

    Args:
      query: Queries, in 16 bits.
      key: Keys.
      value: Values.
      scale: Factor of the scores.
      mask: True where a query attends to a key, beside causality; None for all.
      window: Tokens that a query attends to, including its own; None for all.

    Source: jax `jax/_src/cudnn/fused_attention_stablehlo.py::dot_product_attention`
      (0.10.2 and 0.12.0.1).
    """
    fused = CUDNN_ATTENTION.get()
    attention = fused._dot_product_attention
    names = inspect.signature(attention).parameters
    is_newer = "score_mod" in names  # From jax 0.11 on.
    unused = jnp.zeros(0, query.dtype)
    bias = unused
    if mask is not None:
        bias = fused.combine_bias_and_mask(None, mask, query.dtype)
    arguments = dict(
        query=query,
        key=key,
        value=value,
        bias=bias,
        q_seqlen=unused,
        kv_seqlen=unused,
        q_offsets=unused,
        kv_offsets=unused,
        page_table_k=unused,
        page_table_v=unused,
        scale=scale,
        seed=42,
        dropout_rate=0.0,
        # jax 0.10 computes the gradient of a mask's bias too.
        variadic_args=(mask is not None, mask is not None and not is_newer),
        mask_type=fused.MaskType.CAUSAL,
        layout=fused.AttentionLayout.BTNH.value,
        sliding_window_length=window,
        cudnn_version=ASSUMED_VERSION,
        return_residual=False,
        score_mod_args=(),
        score_mod=None,
    )
    return attention(*(arguments[name] for name in names))
