"""Signature of a fused attention kernel, with the log-sum-exp between its passes."""

from typing import Any, Protocol

from jaxtyping import Array, Float

from bridge.models._kernel_mask import Mask, Scores


class AttentionKernel(Protocol):
    """Both passes of an attention kernel: `FlashKernel` or `CudnnKernel`."""

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
        """Computes the attention output, and the log-sum-exp of scores in float32.

        Args:
          query: Queries.
          key: Keys.
          value: Values.
          scores: Static parameters of the scores.
          mask: Which keys a query sees.
          window: Tokens that a query sees, its own included; None for all before it.

        Returns:
          Attention output, and the log-sum-exp of the scores of each query.
        """
        ...

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
        """Computes the gradients of queries, keys and values.

        Args:
          query: Queries, as passed to `forward`, like all arguments not below.
          key: Keys.
          value: Values.
          out: Attention output over all keys, of this call or others.
          log_sum: Log-sum-exp of the scores with all keys.
          grad: Cotangent of `out`.
          scores: Static parameters of the scores.
          mask: Which keys a query sees.
          window: Tokens that a query sees.

        Returns:
          Gradients of `query`, `key` and `value`.
        """
        ...
