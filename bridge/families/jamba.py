"""Jamba: Mamba 1 mixers, attention in some layers, and experts in some.

Source: transformers `configuration_jamba.py`, `modeling_jamba.py`.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bridge.families._blocks import (
    FUSED_EXPERTS,
    Rules,
    attention,
    experts,
    ignore_tied_head,
    mlp,
    norms,
    outside,
    router,
)
from bridge.families._family import Family, Field, KeyMapping, Layers
from bridge.families._field_transform import FieldTransform
from bridge.families._fields import EXPERT_TRAINING, SIZES, tokens
from bridge.families._layer_types import FULL
from bridge.families._mamba1 import mamba1
from bridge.models import DecoderConfig, LayerKind

_AT = "feed_forward."
_NORMS = {
    "input_layernorm": "input_layernorm",
    "pre_ff_layernorm": "pre_feedforward_layernorm",
}
_FUSED = tuple(
    dataclasses.replace(rule, source=rule.sources[0].replace("mlp.", _AT))
    for rule in FUSED_EXPERTS
)


def _layer(run: Rules) -> Callable[[DecoderConfig, LayerKind], Rules]:
    def rules(config: DecoderConfig, kind: LayerKind) -> Rules:
        mixer = mamba1(config) if kind.mixer == "mamba1" else attention(config)
        inner = mlp(config, _AT)
        if kind.channels == "sparse":
            inner = router(f"{_AT}router") + run
        return mixer + inner + norms(_NORMS)

    return rules


def _mapping(run: Rules) -> KeyMapping:
    outer = outside(norm="model.final_layernorm")
    return KeyMapping(outer, Layers("model.layers.{layer}.", _layer(run)))


_PLACES = {
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "num_experts": 16,
    "num_experts_per_tok": 2,
}


def _read_places(fields: Mapping[str, Any]) -> dict[str, Any]:
    count, experts = fields["num_hidden_layers"], fields["num_experts"]
    attends = _every(fields, "attn_layer", count)
    types = tuple(FULL if i in attends else "mamba1" for i in range(count))
    sparse = _every(fields, "expert_layer", count)
    if experts <= 1 or not sparse:  # The MLP of a dense layer is the only one.
        return {"layer_types": types}
    return {
        "layer_types": types,
        "dense_layers": tuple(i for i in range(count) if i not in sparse),
        "moe.num_experts": experts,
        "moe.num_experts_per_tok": fields["num_experts_per_tok"],
        "moe.intermediate_size": fields["intermediate_size"],
        "moe.rounded_weights": True,
    }


def _every(fields: Mapping[str, Any], name: str, count: int) -> list[int]:
    period, offset = fields[f"{name}_period"], fields[f"{name}_offset"]
    if period < 1 or offset >= period:
        raise ValueError(
            f"{name}_offset {offset} is not below {name}_period {period}, as "
            "transformers wants"
        )
    return [i for i in range(count) if i % period == offset]


def _write_places(config: DecoderConfig) -> dict[str, Any]:
    count, moe = config.num_hidden_layers, config.moe
    types = config.layer_types or (FULL,) * count
    attends = [i for i in range(count) if types[i] == FULL]
    sparse = [i for i in range(count) if moe and i not in config.dense_layers]
    return {
        **_period(attends, "attn_layer", count),
        **_period(sparse, "expert_layer", count),
        "num_experts": moe.num_experts if moe else 1,
        "num_experts_per_tok": moe.num_experts_per_tok if moe else 1,
    }


def _period(layers: Sequence[int], name: str, count: int) -> dict[str, int]:
    first = layers[0] if layers else count
    period = layers[1] - first if len(layers) > 1 else max(first, count) + 1
    return {f"{name}_period": period, f"{name}_offset": first}


_SIZES = {
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_dt_rank": "auto",
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}


def _read_sizes(fields: Mapping[str, Any]) -> dict[str, Any]:
    width, rank = fields["hidden_size"], fields["mamba_dt_rank"]
    return {
        "mamba1.num_channels": fields["mamba_expand"] * width,
        "mamba1.state_size": fields["mamba_d_state"],
        "mamba1.time_step_rank": math.ceil(width / 16) if rank == "auto" else rank,
        "mamba1.kernel_size": fields["mamba_d_conv"],
        "mamba1.conv_bias": fields["mamba_conv_bias"],
        "mamba1.proj_bias": fields["mamba_proj_bias"],
    }


def _write_sizes(config: DecoderConfig) -> dict[str, Any]:
    sizes = config.mamba1
    assert sizes is not None
    return {
        "mamba_d_state": sizes.state_size,
        "mamba_d_conv": sizes.kernel_size,
        "mamba_expand": sizes.num_channels // config.hidden_size,
        "mamba_dt_rank": sizes.time_step_rank,
        "mamba_conv_bias": sizes.conv_bias,
        "mamba_proj_bias": sizes.proj_bias,
    }


FAMILY = Family(
    model_type="jamba",
    architecture="JambaForCausalLM",
    fields={
        **SIZES,
        **tokens(1, 2, 0),
        "num_key_value_heads": Field(8),
        "max_position_embeddings": Field(262144),
        "rms_norm_eps": Field(1e-6, "norm_eps"),
    },
    transforms=(
        FieldTransform(tuple(_PLACES), _read_places, _write_places, _PLACES),
        FieldTransform(tuple(_SIZES), _read_sizes, _write_sizes, _SIZES),
    ),
    constants={"rope": None, "learned_positions": False, "mamba1.norm": True},
    fixed={"hidden_act": "silu", "attention_dropout": 0.0},
    # Which kernel computes a mixer, and what old code kept of logits.
    passthrough={
        **EXPERT_TRAINING,
        "num_logits_to_keep": 1,
        "use_associative_scan": True,
        "use_mamba_kernels": True,
        "use_mambapy": False,
    },
    aliases={"num_local_experts": "num_experts"},
    optional=("moe", "mamba1"),
    key_mappings=(
        _mapping(experts(f"{_AT}experts.{{expert}}.")),
        _mapping(_FUSED),
    ),
    ignore=ignore_tied_head,
)
