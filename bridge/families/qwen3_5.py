"""Qwen3.5, text part: gated delta nets, and gated attention in every fourth layer.

Source: transformers `configuration_qwen3_5.py`, `modeling_qwen3_5.py`.
"""

from collections.abc import Mapping
from typing import Any

from bridge.families._blocks import (
    PRE_NORMS,
    Rules,
    ignore_tied_head,
    key_mapping,
    mlp,
    norms,
)
from bridge.families._delta_net import delta_net_apart, gated_attention
from bridge.families._family import Family, Field
from bridge.families._field_transform import FieldTransform
from bridge.families._fields import SIZES, attention_bias, tokens
from bridge.families._hf_rope import rope
from bridge.families.qwen3_next import LAYER_TYPES, SIZES_OF_DELTA_NET
from bridge.models import DecoderConfig, LayerKind

# How three positions of an image share the rotary dims; those of texts are equal.
_OF_IMAGES = ("mrope_section", "mrope_interleaved")
_ROPES = ("rope_parameters", "rope_scaling")


def _rope_of_texts() -> FieldTransform:
    base = rope(partial=0.25)

    def read(fields: Mapping[str, Any]) -> dict[str, Any]:
        ropes = {
            name: {k: v for k, v in fields[name].items() if k not in _OF_IMAGES}
            for name in _ROPES
            if isinstance(fields.get(name), Mapping)
        }
        return base.read({**fields, **ropes})

    return FieldTransform(base.names, read, base.write, base.defaults)


def mixer(config: DecoderConfig, kind: LayerKind) -> Rules:
    """Rules of a layer's delta net or attention."""
    return (delta_net_apart if kind.mixer == "delta_net" else gated_attention)(config)


def _layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    return mixer(config, kind) + mlp(config) + norms(PRE_NORMS)


FAMILY = Family(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    fields={
        **SIZES,
        **SIZES_OF_DELTA_NET,
        **tokens(None, None),
        **attention_bias(),
        "num_key_value_heads": Field(4),
        "head_dim": Field(256),
        "max_position_embeddings": Field(32768),
        "rms_norm_eps": Field(1e-6, "norm_eps"),
    },
    transforms=(_rope_of_texts(), LAYER_TYPES),
    constants={"norm": "rms_zero_centered", "qk_norm": "head", "attention_gate": True},
    fixed={"hidden_act": "silu", "attention_dropout": 0.0},
    key_mappings=(key_mapping(_layer),),
    ignore=ignore_tied_head,
)
