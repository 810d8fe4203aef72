"""The decoder that the commands train, as a plan, and its loss."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

import fsdp_jax as fsdp
from bridge.models import (
    Decoder,
    DecoderConfig,
    DecoderLayer,
    correction_bias_paths,
    expert_parallel_rules,
    tensor_parallel_rules,
)
from fsdp_jax.cli._context_parallel import (
    SEQUENCES,
    CPForm,
    check_context,
    decoder_options,
)
from fsdp_jax.cli._routing import CountingDecoder, Routing, router_losses

Batch = Int[Array, "batch seq+1"] | dict[str, Int[Array, "batch seq"]]
"""Tokens, each but the first a target too; or both by name."""


def plan_decoder(
    config: DecoderConfig,
    mesh: Mesh,
    fsdp_config: fsdp.FSDPConfig | None = None,
    routing: Routing | None = None,
    *,
    prefetch: int = 1,
    unroll: int = 1,
    cp_form: CPForm = "ring",
) -> fsdp.Plan:
    """Plans the decoder of a config, a layer a unit.

    Its matrices are split over `tp`, its experts over `ep`, and rows over `cp`.
    Routers' biases that no gradient trains are frozen, in float32.

    Args:
      config: The model.
      mesh: From `fsdp_jax.make_mesh`.
      fsdp_config: How it is sharded; default ZeRO-3 in float32.
      routing: How tokens find experts; default dropless, as the model says.
      prefetch: As for `fsdp_jax.scan`.
      unroll: As for `fsdp_jax.scan`.
      cp_form: How tokens see those of other ranks on `cp`, if there are any.
    """
    cp = mesh.shape["cp"]
    check_context(config, cp, mesh.shape["tp"], cp_form, mesh.shape["pp"])
    routing = routing or Routing(router_dtype="model")
    fsdp_config, biases = (
        fsdp_config or fsdp.FSDPConfig(),
        correction_bias_paths(config),
    )
    policy = dataclasses.replace(
        fsdp_config.mp_policy, param_name_patterns_in_fp32=biases
    )
    return fsdp.fully_shard(
        functools.partial(
            *(_make_decoder, config, routing),
            functools.partial(fsdp.scan, prefetch=prefetch, unroll=unroll),
            decoder_options(cp, cp_form),
        ),
        mesh,
        units=[DecoderLayer],
        config=dataclasses.replace(
            fsdp_config,
            pipeline=dataclasses.replace(fsdp_config.pipeline, stack=_stack(config)),
            mp_policy=policy,
            frozen=(*fsdp_config.frozen, *biases),
            tensor_parallel=tensor_parallel_rules(config, mesh.shape["tp"]),
            expert_parallel=expert_parallel_rules(config),
            context_parallel=SEQUENCES,
        ),
    )


def _stack(config: DecoderConfig) -> str:
    """The layers that stages split: the longest run of one structure."""
    runs = config.layer_runs
    sizes = [run.stop - run.start for run in runs]
    return f"layers.{sizes.index(max(sizes))}" if len(runs) > 1 else "layers"


def computed_in(param_dtype: str) -> fsdp.FSDPConfig:
    """Weights are gathered and computed in this dtype, and kept in float32."""
    policy = fsdp.MixedPrecisionPolicy(param_dtype=jnp.dtype(param_dtype))
    return fsdp.FSDPConfig(mp_policy=policy)


def loss_of(*, fused: bool) -> Callable[..., Float[Array, ""]]:
    """The loss that the commands train with: logits at once, or a chunk at a time."""
    return fused_next_token_loss if fused else next_token_loss


def training_loss(
    *,
    fused: bool,
    routing: Routing,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Callable[..., Any]:
    """Makes the loss of `train`: cross entropy, and for experts a balancing loss.

    Args:
      fused: Whether logits are computed by chunks of the vocabulary.
      routing: Routing of models with experts.
      label_smoothing: Fraction of each target spread over the vocabulary.
      z_loss: Weight of the squared log-normalizer of the logits.

    Returns:
      Function `loss(model, batch) -> (loss, metrics)`; the metrics are those of
      experts.
    """
    of_states = functools.partial(
        _fused_loss_of_states if fused else _loss_of_states,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
    )

    def loss(model, batch):
        tokens, targets = _tokens_and_targets(batch)
        states, stats = model.final_states(tokens)
        cross_entropy = of_states(model, states, targets)
        if stats is None:
            return cross_entropy, {}
        if isinstance(model, CountingDecoder):
            model.count(stats)
        balance, reported = router_losses(model.config, routing, stats)
        return cross_entropy + balance, {"cross_entropy": cross_entropy, **reported}

    return loss


def next_token_loss(model: Decoder, batch: Batch) -> Float[Array, ""]:
    """Cross entropy of each token given those before it, in float32, the mean."""
    tokens, targets = _tokens_and_targets(batch)
    states, _ = model.final_states(tokens)
    return _loss_of_states(model, states, targets)


def fused_next_token_loss(model: Decoder, batch: Batch) -> Float[Array, ""]:
    """The same, in the memory of a chunk of the vocabulary; a product more."""
    tokens, targets = _tokens_and_targets(batch)
    states, _ = model.final_states(tokens)
    return _fused_loss_of_states(model, states, targets)


def _tokens_and_targets(batch: Batch) -> tuple[Array, Array]:
    if isinstance(batch, dict):  # Shifted already, as no rank on cp has whole rows.
        return batch["tokens"], batch["targets"]
    return batch[:, :-1], batch[:, 1:]


def _loss_of_states(
    model: Decoder, states: Array, targets: Array, **weights: Any
) -> Float[Array, ""]:
    logits = states @ fsdp.ops.pad_vocabulary(model.head_kernel())
    losses = fsdp.ops.vocab_parallel_cross_entropy(
        model.finish_logits(logits),
        targets,
        vocab_size=model.config.vocab_size,
        **weights,
    )
    return losses.mean()


def _fused_loss_of_states(
    model: Decoder, states: Array, targets: Array, **weights: Any
) -> Float[Array, ""]:
    losses = fsdp.ops.fused_linear_cross_entropy(
        states,
        fsdp.ops.pad_vocabulary(model.head_kernel()),
        targets,
        vocab_size=model.config.vocab_size,
        logit_fn=model.finish_logits,
        **weights,
    )
    return losses.mean()


def _make_decoder(
    config: DecoderConfig,
    routing: Routing,
    scan: Callable[..., Any],
    options: dict[str, Any],
    key: Array,
) -> Decoder:
    make = CountingDecoder if routing.expert_bias_rate else Decoder
    return make(
        routing.apply(config),
        rngs=nnx.Rngs(key),
        scan=scan,
        dispatch=routing.dispatch,
        constrain=fsdp.ops.sequence_parallel,
        **options,
    )
