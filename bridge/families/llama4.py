"""Llama 4: chunked attention, NoPE layers, router weights applied to expert inputs.

The text models alone.

Source: transformers `configuration_llama4.py`, `modeling_llama4.py`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from bridge.families._blocks import (
    PRE_NORMS,
    Rules,
    attention,
    ignore_tied_head,
    key_mapping,
    mlp,
    norms,
    router,
)
from bridge.families._family import Family, Field
from bridge.families._field_transform import FieldTransform
from bridge.families._fields import EXPERT_TRAINING, SIZES, attention_bias, moe, tokens
from bridge.families._hf_rope import rope
from bridge.families._layer_types import FULL, NO_ROPE_LAYERS, interval
from bridge.models import DecoderConfig, LayerKind, QueryScaleConfig
from bridge.rules._rules import Rule

_AT = "feed_forward."
_EXPERTS = (
    Rule(
        f"{_AT}experts.gate_up_proj",
        "mlp.experts.gate_up_proj",
        "experts embed (two expert_mlp) -> experts embed two expert_mlp",
    ),
    Rule(
        f"{_AT}experts.down_proj",
        "mlp.experts.down_proj",
        "experts expert_mlp embed -> experts expert_mlp embed",
    ),
)


def _layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    inner = mlp(config, _AT)
    if kind.channels == "sparse":
        at, to = f"{_AT}shared_expert.", "mlp.shared_expert."
        inner = router(f"{_AT}router") + _EXPERTS + mlp(config, at, to, "shared_mlp")
    return attention(config, norms=None) + inner + norms(PRE_NORMS)


def _read_rope(fields: Mapping[str, Any]) -> dict[str, Any]:
    # transformers takes the [] of Scout's file for its default.
    name = "no_rope_layers"
    return NO_ROPE_LAYERS.read({**fields, name: fields[name] or None})


_ROPE = dataclasses.replace(NO_ROPE_LAYERS, read=_read_rope)
_CHUNKED = "chunked_attention"
_TYPES = {"layer_types": None, "attention_chunk_size": 8192}


def _read_types(fields: Mapping[str, Any]) -> dict[str, Any]:
    given, size = fields["layer_types"], fields["attention_chunk_size"]
    if given is None:
        straight = _ROPE.read(fields)["no_rope_layers"]
        layers = range(fields["num_hidden_layers"])
        given = [FULL if layer in straight else _CHUNKED for layer in layers]
    if size is None:
        raise ValueError("attention_chunk_size = None: transformers needs a number")
    return {"layer_types": tuple(given), "attention_chunk_size": size}


def _write_types(config: DecoderConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in _TYPES}


_SPARSE = {"moe_layers": None, "interleave_moe_layer_step": 1}


def _read_sparse(fields: Mapping[str, Any]) -> dict[str, Any]:
    sparse, count = fields["moe_layers"], fields["num_hidden_layers"]
    if sparse is None:
        step = interval(fields, "interleave_moe_layer_step")
        sparse = range(step - 1, count, step)
    return {"dense_layers": tuple(i for i in range(count) if i not in sparse)}


def _write_sparse(config: DecoderConfig) -> dict[str, Any]:
    layers = range(config.num_hidden_layers)
    return {
        "moe_layers": [i for i in layers if i not in config.dense_layers],
        "interleave_moe_layer_step": 1,
    }


_SCALE = {"attn_temperature_tuning": True, "floor_scale": 8192, "attn_scale": 0.1}


def _read_scale(fields: Mapping[str, Any]) -> dict[str, Any]:
    if not fields["attn_temperature_tuning"]:
        return {}
    return {
        "query_scale": QueryScaleConfig(
            fields["attn_scale"], fields["floor_scale"], offset=1, no_rope_only=True
        )
    }


def _write_scale(config: DecoderConfig) -> dict[str, Any]:
    scale = config.query_scale
    if scale is None:
        return {"attn_temperature_tuning": False}
    return {
        "attn_temperature_tuning": True,
        "floor_scale": scale.length,
        "attn_scale": scale.beta,
    }


_NORMED = "use_qk_norm"

FAMILY = Family(
    model_type="llama4_text",
    architecture="Llama4ForCausalLM",
    also_architectures=("Llama4ForConditionalGeneration",),
    fields={
        **SIZES,
        **tokens(1, 2),
        **attention_bias(),
        **moe(
            num_experts=("num_local_experts", 16),
            num_experts_per_tok=("num_experts_per_tok", 1),
        ),
        "intermediate_size": Field(
            8192, ("moe.intermediate_size", "moe.shared_intermediate_size")
        ),
        "intermediate_size_mlp": Field(16384, "intermediate_size"),
        "num_key_value_heads": Field(8),
        "head_dim": Field(128),
        "max_position_embeddings": Field(4096 * 32),
        "rms_norm_eps": Field(1e-5, "norm_eps"),
    },
    transforms=(
        rope(5e5, types=("default", "llama3"), interleaved=True),
        _ROPE,
        FieldTransform(tuple(_TYPES), _read_types, _write_types, _TYPES),
        FieldTransform(tuple(_SPARSE), _read_sparse, _write_sparse, _SPARSE),
        FieldTransform(tuple(_SCALE), _read_scale, _write_scale, _SCALE),
        FieldTransform(
            (_NORMED,),
            lambda fields: {
                "qk_norm": "l2" if fields[_NORMED] else None,
                "qk_norm_after_rope": bool(fields[_NORMED]),
            },
            lambda config: {_NORMED: config.qk_norm is not None},
            {_NORMED: True},
        ),
    ),
    constants={
        "moe.scoring": "sigmoid",
        "moe.rounded_weights": True,
        "moe.weighted_inputs": True,
    },
    fixed={"hidden_act": "silu", "attention_dropout": 0.0},
    passthrough={**EXPERT_TRAINING, "router_jitter_noise": 0.0},
    key_mappings=(key_mapping(_layer),),
    ignore=ignore_tied_head,
)
