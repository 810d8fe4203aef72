"""cuDNN's fused attention, forward and backward, on GPUs that are present or not."""

import dataclasses
import inspect
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from bridge._compat import CUDNN_ATTENTION
from bridge.models._kernel_mask import Mask, Scores


@dataclasses.dataclass(frozen=True)
class CudnnKernel:
    """Both passes of cuDNN's attention, with the log-sum-exp between them.

    `jax.nn.dot_product_attention` keeps the log-sum-exp for itself, and asks the
    installed cuDNN for its version while the call is traced: it raises where there is
    none. Compiling for absent GPUs needs none, since the kernel is a custom call.
    Given a log-sum-exp over more than its own keys, the backward pass computes the
    gradients of softmaxes with sinks, and of those over the keys of several ranks.

    Source: jax `jax/_src/cudnn/fused_attention_stablehlo.py` (0.10.2 and 0.12.0.1);
      TransformerEngine `context_parallel.py` for the log-sum-exp of all ranks.
    """

    def forward(
        self,
        query: Float[Array, "batch seq heads head_dim"],
        key: Float[Array, "batch keys kv_heads head_dim"],
        value: Float[Array, "batch keys kv_heads v_head_dim"],
        scores: Scores,
        mask: Mask,
        window: Any = None,
    ) -> tuple[
        Float[Array, "batch seq heads v_head_dim"], Float[Array, "batch heads seq"]
    ]:
        """Computes the attention output and the log-sum-exp, as `AttentionKernel`.

        Queries are in 16 bits, and scores have no softcap; of the mask only whether it
        is causal is read.
        """
        fused = CUDNN_ATTENTION.get()
        given = (query, key, value, *_unused(query))
        static = _static(fused, scores, mask, window)
        bind = fused._dot_product_attention_fwd_p_wrapper.bind
        out, log_sum = bind(*given, **static, is_training=True)
        return out, log_sum

    def backward(
        self,
        query: Float[Array, "batch seq heads head_dim"],
        key: Float[Array, "batch keys kv_heads head_dim"],
        value: Float[Array, "batch keys kv_heads v_head_dim"],
        out: Float[Array, "batch seq heads v_head_dim"],
        log_sum: Float[Array, "batch heads seq"],
        grad: Float[Array, "batch seq heads v_head_dim"],
        scores: Scores,
        mask: Mask,
        window: Any = None,
    ) -> tuple[Array, Array, Array]:
        """Computes the gradients of its inputs, as `AttentionKernel`."""
        fused = CUDNN_ATTENTION.get()
        given = (query, key, value, *_unused(query), log_sum, out, grad)
        static = _static(fused, scores, mask, window)
        grads = fused._dot_product_attention_bwd_p_wrapper.bind(*given, **static)
        return grads[0], grads[1], grads[2]


def _unused(query: Array) -> list[Array]:
    """Returns the seven operands between values and statistics, all unused.

    They are bias, lengths of queries and keys, their offsets in packed rows, and page
    tables of keys and values: jax passes empty arrays where it has none.
    """
    return [jnp.zeros(0, query.dtype)] * 7


def _static(fused: Any, scores: Scores, mask: Mask, window: Any) -> dict[str, Any]:
    causal, full = fused.MaskType.CAUSAL, fused.MaskType.NO_MASK
    static = dict(
        scale=scores.scale,
        seed=42,  # Of the dropout, of which there is none: any number.
        dropout_rate=0.0,
        variadic_args=(False, False),  # No bias, and no gradient of one.
        mask_type=causal if mask.causal else full,
        layout=fused.AttentionLayout.BTNH.value,
        sliding_window_length=window,
    )
    # From jax 0.11 on, scores can be changed by a function.
    is_newer = "score_mod" in inspect.signature(fused._dot_product_attention).parameters
    return {**static, "score_mod": None} if is_newer else static
