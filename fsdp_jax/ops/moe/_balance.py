"""Losses and figures of how evenly routers use their experts."""

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
    """Says how unevenly experts are used: 1 if all are alike, more if not.

    `experts * sum(part of the tokens * part of the scores)`, of which the scores alone
    have a gradient. What is balanced is one row's use of experts, or the use that one
    rank's rows make of them together, or those of all ranks: the wider, the freer is a
    single row to use the experts that it needs. A row that is split over `cp` counts
    with all its parts. Everywhere the mean over ranks and
    microbatches, which a training step takes, is the loss of the global batch.

    Args:
      tokens_per_expert: How many tokens of each row chose each expert, as
        `bridge.models.RouterStats` has it.
      scores_per_expert: Sums over the row of scores that add up to 1 for each token.
      over: `sequence`: each row by itself (DeepSeek's, Megatron's `seq_aux_loss`);
        `batch`: the rows of this rank and microbatch (Megatron's `aux_loss`,
        transformers'); `global`: those of all ranks.
      joint_layers: Adds up all layers' tokens and scores before they are multiplied,
        as transformers does, so that an expert that one layer prefers may be one that
        the others avoid; else each layer has a loss of its own.
      axes: The mesh axes on whose ranks are other rows.

    Returns:
      A loss a layer, or one for all with `joint_layers`, float32 at least. That of
      transformers is this one times the experts that each token chooses.

    Source: Switch Transformer (arXiv:2101.03961), section 2.2; Megatron-LM
      `moe_utils.py::switch_load_balancing_loss_func` and `router.py`; transformers
      `modeling_mixtral.py::load_balancing_loss_func`.
    """
    wide = jnp.promote_types(scores_per_expert.dtype, jnp.float32)
    tokens, scores = tokens_per_expert, scores_per_expert.astype(wide)
    if over != "sequence":
        tokens = tokens.sum(-2, keepdims=True)
        scores = scores.sum(-2, keepdims=True)
    # Of a row that is split over cp the tokens count that other ranks have of it.
    tokens = _over_ranks(tokens, axes if over == "global" else SEQUENCE_AXES)
    if joint_layers:
        layers = tuple(range(tokens.ndim - 2))
        tokens, scores = tokens.sum(layers), scores.sum(layers)
    used = _parts(tokens.astype(wide)) * _parts(scores)
    return tokens.shape[-1] * used.sum(-1).mean(-1)


def max_expert_load(
    tokens_per_expert: Counts, *, axes: Sequence[str] = DATA_AXES
) -> Float[Array, "*layers"]:
    """How many times its even share the busiest expert has, of the rows of all ranks.

    Args:
      tokens_per_expert: As in `load_balancing_loss`.
      axes: As there.

    Returns:
      1 if all experts are used alike, the number of experts if one is alone.
    """
    tokens = _over_ranks(tokens_per_expert.sum(-2), axes).astype(jnp.float32)
    return tokens.max(-1) / tokens.mean(-1)


def _parts(amounts: Array) -> Array:
    """What part each expert has; their sum is a number of tokens, without gradient."""
    return amounts / lax.stop_gradient(amounts.sum(-1, keepdims=True))


def _over_ranks(tokens: Array, axes: Sequence[str]) -> Array:
    manual = jax.sharding.get_abstract_mesh().manual_axes
    over = tuple(axis for axis in axes if axis in manual)
    return lax.psum(tokens, over) if over else tokens
