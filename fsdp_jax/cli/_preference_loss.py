"""Losses over rows of pairs: direct preference optimization (DPO), and rewards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from jaxtyping import Array, Float

import fsdp_jax as fsdp
from fsdp_jax.checkpoint._paths import as_path, is_local
from fsdp_jax.cli._data_config import Objective
from fsdp_jax.cli._decoder_loss import LossConfig, balance_of_experts, losses_of_tokens
from fsdp_jax.cli._routing import Routing
from fsdp_jax.cli._run_options import EvalOptions
from fsdp_jax.cli._train_options import BatchOptions, MeshOptions, StartOptions

_BETA = 0.1


def check_preferences(
    save: Path,
    mesh: MeshOptions,
    start: StartOptions,
    batches: BatchOptions,
    evaluation: EvalOptions,
    *,
    objective: Objective,
    fused: bool,
) -> None:
    """Raises a `ValueError` for options that training on pairs does not have.

    Args:
      save: Directory for the checkpoints.
      mesh: Device mesh.
      start: Origin of the weights.
      batches: Batches of the data.
      evaluation: Held-out data.
      objective: What is learned.
      fused: Whether logits are computed by chunks of the vocabulary.
    """
    axes = {"cp": mesh.cp, "pp": mesh.pp}
    wrong = [f"{axis}={size}" for axis, size in axes.items() if size > 1]
    options = {
        f"--config {start.config}": start.config is not None,
        "--eval-data": bool(evaluation.eval_data),
        f"--rows {batches.rows}": batches.rows is not None,
        f"--save {save}": not is_local(as_path(save)),
    }
    if objective == "reward":  # It has no logits.
        options |= {"--sample": bool(evaluation.sample), "--no-fused-loss": not fused}
    wrong += [option for option, given in options.items() if given]
    if wrong:
        raise ValueError(
            f"--objective {objective} with {', '.join(wrong)} is not supported."
        )


def preference_loss(
    *, fused: bool, routing: Routing, terms: LossConfig
) -> Callable[..., Any]:
    """Makes the mean loss of `fsdp_jax.rl.dpo_loss` over batches of pairs.

    Args:
      fused: Whether logits are computed by chunks of the vocabulary.
      routing: Routing of models with experts.
      terms: Strength of the pull to the reference, and label smoothing.

    Returns:
      Function `loss(model, batch) -> (loss, metrics)`; the metrics are the rewards of
      both answers, their difference, and the share of pairs in which it is positive.
    """
    beta = _BETA if terms.dpo_beta is None else terms.dpo_beta

    def loss(model, batch):
        log_probs, stats = answer_log_probs(model, batch, fused)
        found = fsdp.rl.dpo_loss(
            *log_probs.T,
            *batch["reference"].T,
            beta=beta,
            label_smoothing=terms.label_smoothing,
        )
        metrics = _reward_metrics(found.chosen_rewards, found.rejected_rewards)
        return _with_balance(model, routing, found.loss.mean(), metrics, stats)

    return loss


def reward_model_loss(routing: Routing) -> Callable[..., Any]:
    """Makes the mean loss of `fsdp_jax.rl.reward_loss` over batches of pairs.

    Args:
      routing: Routing of models with experts.

    Returns:
      Function `loss(model, batch) -> (loss, metrics)` of a `ScoredDecoder`; the metrics
      are those of `preference_loss`.
    """

    def loss(model, batch):
        rows = _sides_as_rows(batch, "tokens", "positions", "segment_ids", "weights")
        states, stats = model.final_states(
            rows["tokens"], rows["positions"], rows["segment_ids"]
        )
        scores = model.score_of_last(states, rows["weights"])
        chosen, rejected = scores.reshape(-1, 2).T
        mean = fsdp.rl.reward_loss(chosen, rejected).mean()
        metrics = jax.lax.stop_gradient(_reward_metrics(chosen, rejected))
        return _with_balance(model, routing, mean, metrics, stats)

    return loss


def _reward_metrics(
    chosen: Float[Array, " pairs"], rejected: Float[Array, " pairs"]
) -> dict[str, Array]:
    margin = chosen - rejected
    return {
        "chosen_rewards": chosen.mean(),
        "rejected_rewards": rejected.mean(),
        "reward_margin": margin.mean(),
        "reward_accuracy": (margin > 0).astype(margin.dtype).mean(),
    }


def _with_balance(
    model: Any, routing: Routing, mean: Array, metrics: dict[str, Array], stats: Any
) -> tuple[Array, dict[str, Array]]:
    """Returns the loss with the balancing loss of experts, if there are any."""
    if stats is None:
        return mean, metrics
    balance, reported = balance_of_experts(model, routing, stats)
    return mean + balance, {**metrics, **reported}


def _sides_as_rows(batch: Mapping[str, Array], *names: str) -> dict[str, Array]:
    """Returns leaves of a batch of pairs with a row for each answer."""
    seq = batch["tokens"].shape[-1]
    return {name: batch[name].reshape(-1, seq) for name in names}


def answer_log_probs(
    model: Any, batch: Mapping[str, Array], fused: bool
) -> tuple[Float[Array, "pairs 2"], Any]:
    """Returns the log-probability of both answers, and the routers' statistics.

    Args:
      model: Decoder.
      batch: Pairs.
      fused: Whether logits are computed by chunks of the vocabulary.
    """
    names = ("tokens", "targets", "positions", "segment_ids", "weights")
    rows = _sides_as_rows(batch, *names)
    states, stats = model.final_states(
        rows["tokens"], rows["positions"], rows["segment_ids"]
    )
    losses = losses_of_tokens(fused, LossConfig())(model, states, rows["targets"])
    sums = fsdp.rl.sequence_log_probs(-losses, rows["weights"] > 0)
    return sums.reshape(-1, 2), stats
