"""Plan and loss of the decoder that the commands train."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

import fsdp_jax as fsdp
from bridge.hf._score_head import without_head
from bridge.models import (
    Decoder,
    DecoderConfig,
    DecoderLayer,
    RouterStats,
    WantedKernel,
    constant_paths,
    correction_bias_paths,
    expert_parallel_rules,
    float8_grouped_matmul,
    float8_product,
    mxfp8_product,
    tensor_parallel_rules,
)
from fsdp_jax.cli._attention_table import attention_choices, settings_of
from fsdp_jax.cli._context_parallel import (
    SEQUENCES,
    CPForm,
    check_context,
    decoder_options,
)
from fsdp_jax.cli._precision import ExpertProducts, Products
from fsdp_jax.cli._routing import CountingDecoder, Routing, router_losses
from fsdp_jax.cli._score_head import ScoredDecoder

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
    attention: WantedKernel = "auto",
    products: Products = "param_dtype",
    expert_products: ExpertProducts = "param_dtype",
    num_layers_at_start_in_bf16: int = 0,
    num_layers_at_end_in_bf16: int = 0,
    batch_parts: int = 1,
    sequences: Mapping[str, int] = SEQUENCES,
    scored: bool = False,
) -> fsdp.Plan:
    """Plans the decoder of a config, with a layer as a unit.

    Matrices are split over `tp`, experts over `ep`, and rows over `cp`. Routers' biases
    that no gradient trains are frozen, in float32.

    Args:
      config: Config of the model.
      mesh: Device mesh from `fsdp_jax.make_mesh`.
      fsdp_config: Sharding; default ZeRO-3 in float32.
      routing: Routing of models with experts; default dropless, by the config.
      prefetch: Layers gathered ahead, as for `fsdp_jax.scan`.
      unroll: Layers in one iteration of the loop, as for `fsdp_jax.scan`.
      cp_form: Context-parallel attention algorithm.
      attention: Attention kernel; auto for the first that the devices can run.
      products: Format of the operands of projections of attention and MLPs.
      expert_products: Format of the operands of grouped products of experts.
      num_layers_at_start_in_bf16: Number of first layers that keep the compute dtype
        for these.
      num_layers_at_end_in_bf16: Number of last layers likewise.
      batch_parts: Parts of a rank's rows that a layer runs side by side.
      sequences: Dim of each leaf of a batch that is split over `cp`.
      scored: Whether a score head replaces the output projection (`ScoredDecoder`).
    """
    cp = mesh.shape["cp"]
    check_context(config, cp, mesh.shape["tp"], cp_form, mesh.shape["pp"])
    formats = _product_options(config, products, expert_products)
    routing = routing or Routing(router_dtype="model")
    routing.check_mesh(mesh)
    fsdp_config = fsdp_config or fsdp.FSDPConfig()
    # Refuses a kernel that the devices cannot run, before anything is traced.
    packed = "segment_ids" in sequences
    settings = settings_of(mesh, fsdp_config, cp_form, attention, packed=packed)
    attention_choices(config, settings)
    make = functools.partial(
        _make_decoder,
        ScoredDecoder if scored else _decoder_class(routing),
        config,
        routing,
        functools.partial(fsdp.scan, prefetch=prefetch, unroll=unroll),
        decoder_options(cp, cp_form, attention)
        | formats
        | {
            "num_layers_at_start_in_bf16": num_layers_at_start_in_bf16,
            "num_layers_at_end_in_bf16": num_layers_at_end_in_bf16,
            "batch_parts": batch_parts,
        },
    )
    rules = tensor_parallel_rules(
        without_head(config) if scored else config, mesh.shape["tp"]
    )
    sharding = dataclasses.replace(
        _of_decoder(fsdp_config, config),
        tensor_parallel=rules,
        context_parallel=sequences,
    )
    return fsdp.fully_shard(make, mesh, units=[DecoderLayer], config=sharding)


# Weights that `Float8Gather` communicated are multiplied as they came.
_FLOAT8, _GROUPED_FLOAT8 = (
    functools.partial(product, rounded=fsdp.step.gathered_float8)
    for product in (float8_product, float8_grouped_matmul)
)
_PRODUCTS = {"float8": _FLOAT8, "mxfp8": mxfp8_product}
_FLOAT8_EXPERTS = {"expert_product": _GROUPED_FLOAT8}


def _product_options(
    config: DecoderConfig, products: Products, expert_products: ExpertProducts
) -> dict[str, Any]:
    """Returns the products that a decoder is made with, as its arguments."""
    if expert_products != "param_dtype" and config.moe is None:
        raise ValueError(
            f"expert_products={expert_products}: without effect, as the model has no "
            "experts. Leave it out."
        )
    linear = {} if products == "param_dtype" else {"product": _PRODUCTS[products]}
    return linear | ({} if expert_products == "param_dtype" else _FLOAT8_EXPERTS)


def _of_decoder(given: fsdp.FSDPConfig, config: DecoderConfig) -> fsdp.FSDPConfig:
    """Returns the sharding with what the layers of the decoder ask for."""
    biases = correction_bias_paths(config)
    return dataclasses.replace(
        given,
        pipeline=dataclasses.replace(given.pipeline, stack=_stack(config)),
        mp_policy=dataclasses.replace(
            given.mp_policy, param_name_patterns_in_fp32=biases
        ),
        frozen=_frozen(config, given),
        expert_parallel=expert_parallel_rules(config),
    )


def _frozen(config: DecoderConfig, given: fsdp.FSDPConfig) -> tuple[str, ...]:
    """Returns the parameters that no gradient moves; LoRA says so of all."""
    if given.lora is not None:
        return given.frozen
    own = correction_bias_paths(config) + constant_paths(config)
    return (*given.frozen, *own)


def _stack(config: DecoderConfig) -> str:
    """Returns the path of the layers that stages split: the longest block."""
    blocks = config.layer_blocks
    sizes = [block.stop - block.start for block in blocks]
    return f"layers.{sizes.index(max(sizes))}" if len(blocks) > 1 else "layers"


def computed_in(param_dtype: str) -> fsdp.FSDPConfig:
    """Returns a config that computes in this dtype and stores weights in float32."""
    policy = fsdp.MixedPrecisionPolicy(param_dtype=jnp.dtype(param_dtype))
    return fsdp.FSDPConfig(mp_policy=policy)


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


def _decoder_class(routing: Routing) -> type[Decoder]:
    return CountingDecoder if routing.expert_bias_rate else Decoder


def _make_decoder(
    make: Callable[..., Decoder],
    config: DecoderConfig,
    routing: Routing,
    scan: Callable[..., Any],
    options: dict[str, Any],
    key: Array,
) -> Decoder:
    return make(
        routing.apply(config),
        rngs=nnx.Rngs(key),
        scan=scan,
        dispatch=routing.dispatch,
        constrain=fsdp.ops.sequence_parallel,
        **options,
    )
