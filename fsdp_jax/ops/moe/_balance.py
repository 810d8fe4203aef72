"""Load balance of routers: auxiliary losses and metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Num

from fsdp_jax.sharding._mesh import DATA_AXES, SEQUENCE_AXES

Over = Literal["sequence", "batch", "global"]
Counts = Num[Array, "*layers batch experts"]


def load_balancing_loss(
    tokens_per_expert: Counts,
    scores_per_expert: Float[Array, "*layers batch experts"],
    *,
    over: Over = "batch",
    joint_layers: bool = False,
    axes: Sequence[str] = DATA_AXES,
) -> Float[Array, "*layers"]:
    """Computes the load balancing loss: 1 if experts are used evenly, more if not.

    It is `experts * sum(fraction of tokens * fraction of scores)`, where only the
    scores have a gradient. It balances the use of experts within one row, over the rows
    of one rank, or over those of all ranks: the wider, the freer a single row is to use
    the experts that it needs. A row that is split over `cp` counts with all its parts.
    In all cases the mean over ranks and microbatches, which a training step takes, is
    the loss of the global batch.

    Args:
      tokens_per_expert: Number of tokens of each row that chose each expert, as in
        `bridge.models.RouterStats`.
      scores_per_expert: Sums over the row of scores that add up to 1 for each token.
      over: `sequence`: each row by itself (DeepSeek's, Megatron's `seq_aux_loss`);
        `batch`: the rows of this rank and microbatch (Megatron's `aux_loss`,
        transformers'); `global`: those of all ranks.
      joint_layers: Whether to sum tokens and scores of all layers before they are
        multiplied, as transformers does, so that an expert preferred in one layer may
        be avoided in others; else each layer has its own loss.
      axes: Mesh axes whose ranks have different rows.

    Returns:
      One loss per layer, or one for all with `joint_layers`, float32 at least. That of
      transformers is this one times the number of experts per token.

    Source: Switch Transformer (arXiv:2101.03961), section 2.2; Megatron-LM
      `moe_utils.py::switch_load_balancing_loss_func` and `router.py`; transformers
      `modeling_mixtral.py::load_balancing_loss_func`.
    """
    wide = jnp.promote_types(scores_per_expert.dtype, jnp.float32)
    tokens, scores = tokens_per_expert, scores_per_expert.astype(wide)
    if over != "sequence":
        tokens = tokens.sum(-2, keepdims=True)
        scores = scores.sum(-2, keepdims=True)
    # A row that is split over cp also counts its tokens on the other cp ranks.
    tokens = _over_ranks(tokens, axes if over == "global" else SEQUENCE_AXES)
    if joint_layers:
        layers = tuple(range(tokens.ndim - 2))
        # Before `_parts`, so that the product is that of the joint fractions.
        tokens, scores = tokens.sum(layers), scores.sum(layers)
    used = _parts(tokens.astype(wide)) * _parts(scores)
    return tokens.shape[-1] * used.sum(-1).mean(-1)


def max_expert_load(
    tokens_per_expert: Counts, *, axes: Sequence[str] = DATA_AXES
) -> Float[Array, "*layers"]:
    """Returns the load of the busiest expert relative to the mean, over all ranks.

    Args:
      tokens_per_expert: Number of tokens of each row that chose each expert.
      axes: Mesh axes whose ranks have different rows.

    Returns:
      1 if all experts are used evenly, the number of experts if only one is used; 0 if
      there is no token.
    """
    tokens = _over_ranks(tokens_per_expert.sum(-2), axes).astype(jnp.float32)
    return tokens.shape[-1] * _parts(tokens).max(-1)


def _parts(amounts: Array) -> Array:
    """Returns each expert's fraction; the total is a token count without gradient."""
    total = lax.stop_gradient(amounts.sum(-1, keepdims=True))
    # A row without tokens has no fractions, and adds nothing.
    return amounts / jnp.where(total == 0, jnp.ones_like(total), total)


def _over_ranks(tokens: Array, axes: Sequence[str]) -> Array:
    manual = jax.sharding.get_abstract_mesh().manual_axes
    over = tuple(axis for axis in axes if axis in manual)
    return lax.psum(tokens, over) if over else tokens
