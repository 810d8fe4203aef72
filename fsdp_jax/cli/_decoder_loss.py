"""Losses of the decoder that the commands train."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import fsdp_jax as fsdp
from bridge.models import Decoder, RouterStats
from fsdp_jax.cli._routing import CountingDecoder, Routing, router_losses

Batch = Int[Array, "batch seq+1"] | dict[str, Int[Array, "batch seq"]]
"""Tokens, each but the first a target too; or both by name."""


def loss_of(*, fused: bool) -> Callable[..., Float[Array, ""]]:
    """Returns the loss of text: with all logits at once, or by chunks."""
    return fused_next_token_loss if fused else next_token_loss


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """Terms of the loss beside the cross entropy.

    Attributes:
      label_smoothing: Fraction of each target spread over the vocabulary.
      z_loss: Weight of the squared log-normalizer of the logits.
      dpo_beta: Strength of the pull to the reference model; None for the default.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    dpo_beta: float | None = None

    def problems(self) -> list[str]:
        """Returns what is out of range, by option."""
        wrong = []
        if not 0 <= self.label_smoothing < 1:
            wrong.append(
                f"--label-smoothing {self.label_smoothing} must be at least 0 and less "
                "than 1"
            )
        if not 0 <= self.z_loss < math.inf:
            wrong.append(f"--z-loss {self.z_loss} must be finite and at least 0")
        if self.dpo_beta is not None and not 0 < self.dpo_beta < math.inf:
            wrong.append(f"--dpo-beta {self.dpo_beta}: a finite number, more than 0")
        return wrong


def training_loss(
    *, fused: bool, routing: Routing, terms: LossConfig = LossConfig()
) -> Callable[..., Any]:
    """Makes the loss of text: cross entropy, and for experts a balancing loss.

    Args:
      fused: Whether logits are computed by chunks of the vocabulary.
      routing: Routing of models with experts.
      terms: Terms beside the cross entropy.

    Returns:
      Function `loss(model, batch) -> (loss, metrics)`; the metrics are those of
      experts.
    """
    of_tokens = losses_of_tokens(fused, terms)

    def loss(model, batch):
        tokens, targets = _tokens_and_targets(batch)
        states, stats = model.final_states(tokens)
        cross_entropy = of_tokens(model, states, targets).mean()
        if stats is None:
            return cross_entropy, {}
        balance, reported = balance_of_experts(model, routing, stats)
        return cross_entropy + balance, {"cross_entropy": cross_entropy, **reported}

    return loss


def document_loss(
    *, fused: bool, routing: Routing, terms: LossConfig = LossConfig()
) -> Callable[..., Any]:
    """Makes the loss of rows of documents, for `calculate_per_token_loss=True`.

    Args:
      fused: Whether logits are computed by chunks of the vocabulary.
      routing: Routing of models with experts.
      terms: Terms beside the cross entropy.

    Returns:
      Function `loss(model, batch) -> ((sum, count), metrics)` over the tokens whose
      weight is not 0; a balancing loss of experts counts once for each of them.
    """
    of_rows = _sum_over_rows(losses_of_tokens(fused, terms))

    def loss(model, batch):
        total, count, stats = of_rows(model, batch)
        if stats is None:
            return (total, count), {}
        balance, reported = balance_of_experts(model, routing, stats)
        return (total + balance * count, count), reported

    return loss


def held_out_loss(*, fused: bool) -> Callable[..., Any]:
    """Makes the cross entropy of rows of documents, for `make_eval_step`.

    Args:
      fused: Whether logits are computed by chunks of the vocabulary.

    Returns:
      Function `loss(model, batch) -> (sum, count)` over the tokens whose weight is not
      0.
    """
    of_rows = _sum_over_rows(losses_of_tokens(fused, LossConfig()))

    def loss(model, batch):
        total, count, _ = of_rows(model, batch)
        return total, count

    return loss


def losses_of_tokens(fused: bool, terms: LossConfig) -> Callable[..., Array]:
    """Returns the function `(model, states, targets)` to the loss of each token.

    Args:
      fused: Whether logits are computed by chunks of the vocabulary.
      terms: Terms beside the cross entropy.
    """
    of_tokens = _fused_token_losses if fused else _token_losses
    return functools.partial(
        of_tokens, label_smoothing=terms.label_smoothing, z_loss=terms.z_loss
    )


def _sum_over_rows(of_tokens: Callable[..., Array]) -> Callable[..., Any]:
    """Makes the sum over this rank's documents: the step sums over ranks."""

    def of_rows(model, batch):
        states, stats = model.final_states(
            batch["tokens"], batch["positions"], batch["segment_ids"]
        )
        is_trained = batch["weights"] > 0
        losses = of_tokens(model, states, batch["targets"])
        total = fsdp.ops.masked_sum(losses, is_trained, axes=())
        return total, fsdp.ops.masked_count(is_trained, axes=()), stats

    return of_rows


def balance_of_experts(
    model: Decoder, routing: Routing, stats: RouterStats
) -> tuple[Array, dict[str, Array]]:
    """Returns the balancing loss of experts, with what the metrics say of it."""
    if isinstance(model, CountingDecoder):
        model.count(stats)
    return router_losses(model.config, routing, stats)


def next_token_loss(model: Decoder, batch: Batch) -> Float[Array, ""]:
    """Computes the mean cross entropy of each token given those before it."""
    tokens, targets = _tokens_and_targets(batch)
    states, _ = model.final_states(tokens)
    return _token_losses(model, states, targets).mean()


def fused_next_token_loss(model: Decoder, batch: Batch) -> Float[Array, ""]:
    """Computes `next_token_loss` by chunks of the vocabulary."""
    tokens, targets = _tokens_and_targets(batch)
    states, _ = model.final_states(tokens)
    return _fused_token_losses(model, states, targets).mean()


def _tokens_and_targets(batch: Batch) -> tuple[Array, Array]:
    if isinstance(batch, dict):  # Shifted already, as no rank on cp has whole rows.
        return batch["tokens"], batch["targets"]
    return batch[:, :-1], batch[:, 1:]


def _with_head_bias(model: Decoder, states: Array) -> tuple[Array, Array]:
    """Makes a bias of the head one more row of its kernel, and each state one more 1.

    So losses that compute the vocabulary in chunks need to know of no bias.
    """
    kernel, bias = model.head_kernel(), model.head_bias()
    if bias is None:
        return states, kernel
    ones = jnp.ones((*states.shape[:-1], 1), states.dtype)
    return (
        jnp.concatenate([states, ones], axis=-1),
        jnp.concatenate([kernel, bias[None]], axis=0),
    )


def _token_losses(
    model: Decoder, states: Array, targets: Array, **weights: Any
) -> Float[Array, "batch seq"]:
    states, kernel = _with_head_bias(model, states)
    logits = states @ fsdp.ops.pad_vocabulary(kernel)
    return fsdp.ops.vocab_parallel_cross_entropy(
        model.finish_logits(logits),
        targets,
        vocab_size=model.config.vocab_size,
        **weights,
    )


def _fused_token_losses(
    model: Decoder, states: Array, targets: Array, **weights: Any
) -> Float[Array, "batch seq"]:
    states, kernel = _with_head_bias(model, states)
    return fsdp.ops.fused_linear_cross_entropy(
        states,
        fsdp.ops.pad_vocabulary(kernel),
        targets,
        vocab_size=model.config.vocab_size,
        logit_fn=model.finish_logits,
        **weights,
    )
