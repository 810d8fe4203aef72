"""Statistics of routers, for load-balancing losses and reports."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class RouterStats(NamedTuple):
    """Statistics of routers, summed over the tokens of each row.

    They suffice for load-balancing losses per row, batch or over all ranks, for the
    router's z-loss, for biases that follow the load, and for reports.

    Attributes:
      tokens_per_expert: Number of tokens that chose each expert.
      scores_per_expert: Sums of the router's scores, normalized to 1 per token:
        probabilities, or sigmoids divided by their sum. Differentiable.
      z_loss: Mean over the row's tokens of the squared log-sum-exp of the logits.
        Differentiable.
      dropped: Number of dropped choices, as experts were full; 0 if dropless.
    """

    tokens_per_expert: Int[Array, "*layers batch experts"]
    scores_per_expert: Float[Array, "*layers batch experts"]
    z_loss: Float[Array, "*layers batch"]
    dropped: Int[Array, "*layers batch"]


def router_stats(
    logits: Float[Array, "batch seq experts"],
    experts: Int[Array, "batch seq chosen"],
    dropped: Int[Array, "batch seq"],
    *,
    sigmoid: bool,
) -> RouterStats:
    """Computes the statistics of one router.

    Args:
      logits: Logits of all experts.
      experts: Indices of the chosen experts.
      dropped: Number of dropped experts of each token.
      sigmoid: Whether scores are sigmoids instead of a softmax.

    Source: transformers `modeling_mixtral.py::load_balancing_loss_func`; Megatron-LM
      `moe_utils.py::switch_load_balancing_loss_func`, `z_loss_func` and
      `compute_routing_scores_for_aux_loss`.
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    if sigmoid:
        scores = jax.nn.sigmoid(logits)
        scores /= scores.sum(-1, keepdims=True) + 1e-20
    else:
        scores = jax.nn.softmax(logits, axis=-1)
    chosen = jax.nn.one_hot(experts, logits.shape[-1], dtype=jnp.int32)
    return RouterStats(
        chosen.sum((1, 2)),
        scores.sum(1),
        jnp.square(jax.nn.logsumexp(logits, axis=-1)).mean(-1),
        dropped.sum(-1),
    )
