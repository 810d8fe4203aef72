"""Router state that is updated once per step from global counts, not by gradients."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Num


def update_expert_bias(
    bias: Float[Array, "*layers experts"],
    tokens_per_expert: Num[Array, "*layers experts"],
    rate: float,
) -> Float[Array, "*layers experts"]:
    """Moves each expert's bias by `rate` towards an even load.

    The bias increases if the expert got fewer tokens than the mean, and decreases if it
    got more.

    This balances the load without a loss term. Call it in `update_model_state`, with
    tokens counted in a `Tally`, which by then holds those of all ranks and
    microbatches, and reset the count to zero. The bias may be a Variable of the model,
    or a frozen parameter (and, under a narrow `param_dtype`, one of
    `param_name_patterns_in_fp32`, since updates are small).

    Args:
      bias: Bias added to the router's scores when experts are chosen.
      tokens_per_expert: Number of tokens routed to each expert, per layer.
      rate: Update size, e.g. 1e-3.

    Returns:
      The new bias. An expert with exactly the mean keeps its own.

    Source: DeepSeek-V3 technical report, section 2.1.2; Megatron-LM
      `finalize_model_grads.py::_update_router_expert_bias`.
    """
    tokens = tokens_per_expert.astype(jnp.float32)
    mean = tokens.mean(-1, keepdims=True)
    return bias + rate * jnp.sign(mean - tokens).astype(bias.dtype)


def update_qb_beta(
    beta: Float[Array, " experts"],
    accumulated: Float[Array, " experts"],
    count: Num[Array, ""],
    ema: float,
) -> Float[Array, " experts"]:
    """Moves a router's beta towards the mean of the proposed values, and centres it.

    Args:
      beta: Current beta.
      accumulated: Sum of the values proposed by all forward passes of all ranks, in a
        `Tally`.
      count: Number of these forward passes, in a `Tally`; 0 leaves only the decay.
      ema: Weight of the current beta, 0 to 1.

    Returns:
      The new beta, whose mean over experts is zero.

    Source: Megatron-LM `finalize_model_grads.py`, which averages the means of ranks:
      the same, since all ranks run equally many forward passes.
    """
    mean = accumulated / jnp.maximum(count, 1).astype(accumulated.dtype)
    new = ema * beta + (1 - ema) * mean.astype(beta.dtype)
    return new - new.mean()
