"""What routers did with the tokens of a batch: all that losses and reports need."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class RouterStats(NamedTuple):
    """Sums over the tokens of each row, of one layer or of several.

    Everything that balances experts is made of these: load-balancing losses of a row, a
    batch or all ranks, the router's z-loss, biases that follow the load, reports.

    Attributes:
      tokens_per_expert: How many tokens chose each expert.
      scores_per_expert: Sums of the router's scores, which of each token add up to 1:
        probabilities, or sigmoids over their sum. Differentiable.
      z_loss: The mean over the row's tokens of the square of the logits' log-sum-exp.
        Differentiable.
      dropped: Choices that no expert had room for; 0 where all are dropless.
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
    """Sums up what a router did.

    Args:
      logits: Of all experts.
      experts: The chosen ones.
      dropped: How many of its experts each token did not get.
      sigmoid: Whether scores are sigmoids, and no softmax.

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
