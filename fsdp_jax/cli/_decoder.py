"""Plan of the decoder that the commands train."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array

import fsdp_jax as fsdp
from bridge.hf._score_head import without_head
from bridge.models import (
    Decoder,
    DecoderConfig,
    DecoderLayer,
    SharedBlock,
    WantedKernel,
    constant_paths,
    correction_bias_paths,
    expert_parallel_rules,
    float8_grouped_matmul,
    float8_product,
    mxfp8_product,
    tensor_parallel_rules,
    token_expert_paths,
)
from fsdp_jax.cli._attention_table import attention_choices, settings_of
from fsdp_jax.cli._context_parallel import (
    SEQUENCES,
    CPForm,
    check_context,
    decoder_options,
)
from fsdp_jax.cli._precision import ExpertProducts, Products
from fsdp_jax.cli._routing import CountingDecoder, Routing
from fsdp_jax.cli._score_head import ScoredDecoder


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
    """Plans the decoder of a config, with a layer, or a shared block, as a unit.

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
    return fsdp.fully_shard(make, mesh, units=_units(config), config=sharding)


def _units(config: DecoderConfig) -> list[type[nnx.Module]]:
    return [DecoderLayer, *([SharedBlock] * (config.shared_blocks is not None))]


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
    kept = correction_bias_paths(config) + token_expert_paths(config)
    return dataclasses.replace(
        given,
        pipeline=dataclasses.replace(given.pipeline, stack=_stack(config)),
        mp_policy=dataclasses.replace(
            given.mp_policy, param_name_patterns_in_fp32=kept
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
