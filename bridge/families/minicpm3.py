"""MiniCPM3: latent attention, with factors of embeddings, of layers and of logits.

Source: transformers `configuration_minicpm3.py`, `modeling_minicpm3.py`.
"""

import math
from collections.abc import Mapping
from typing import Any

from bridge.families import _deepseek
from bridge.families._blocks import (
    PRE_NORMS,
    Rules,
    ignore_tied_head,
    key_mapping,
    latent_attention,
    mlp,
    norms,
)
from bridge.families._family import Family, Field
from bridge.families._field_transform import FieldTransform
from bridge.families._hf_rope import rope
from bridge.models import DecoderConfig, LayerKind


def _layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    del kind
    return latent_attention(config) + mlp(config) + norms(PRE_NORMS)


_FACTORS = {"scale_depth": 1.4, "dim_model_base": 256, "v_head_dim": None}


def _read_factors(fields: Mapping[str, Any]) -> dict[str, Any]:
    layers, width = fields["num_hidden_layers"], fields["hidden_size"]
    depth, base = fields["scale_depth"], fields["dim_model_base"]
    head = fields["v_head_dim"]
    return {
        "residual_multiplier": 1.0 if depth is None else depth / math.sqrt(layers),
        "logits_scaling": 1.0 if base is None else width / base,
        "mla.v_head_dim": (
            width // fields["num_attention_heads"] if head is None else head
        ),
    }


def _write_factors(config: DecoderConfig) -> dict[str, Any]:
    root = math.sqrt(config.num_hidden_layers)
    depth = config.residual_multiplier * root
    # The product may be off by a rounding: of its neighbours one is what was read.
    near = (round(depth, 12), depth, *(math.nextafter(depth, to) for to in (0, 9e9)))
    exact = [value for value in near if value / root == config.residual_multiplier]
    return {
        "scale_depth": exact[0] if exact else depth,
        "dim_model_base": round(config.hidden_size / config.logits_scaling),
        "v_head_dim": config.v_head_dim,
    }


_SIZES = {name: f for name, f in _deepseek.FIELDS.items() if name not in _FACTORS}

FAMILY = Family(
    model_type="minicpm3",
    architecture="MiniCPM3ForCausalLM",
    fields={
        **_SIZES,
        "num_key_value_heads": Field(40),
        "kv_lora_rank": Field(256, "mla.kv_lora_rank"),
        "q_lora_rank": Field(768, "mla.q_lora_rank"),
        "qk_nope_head_dim": Field(64, "mla.qk_nope_head_dim"),
        "qk_rope_head_dim": Field(32, "mla.qk_rope_head_dim"),
        "max_position_embeddings": Field(32768),
        "rms_norm_eps": Field(1e-5, "norm_eps"),
        "initializer_range": Field(0.1),
        "tie_word_embeddings": Field(True),
        "mlp_bias": Field(False),
        "scale_emb": Field(12, "embedding_multiplier"),
    },
    transforms=(
        rope(),
        _deepseek.DERIVED_SIZES,
        FieldTransform(tuple(_FACTORS), _read_factors, _write_factors, _FACTORS),
    ),
    fixed={"hidden_act": "silu"},
    passthrough={"attention_dropout": 0.0},
    key_mappings=(key_mapping(_layer),),
    ignore=ignore_tied_head,
)
