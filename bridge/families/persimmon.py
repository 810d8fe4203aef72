"""Persimmon: each head behind a layer norm, squared ReLUs, half of a head rotary.

The rows of q, k and v are one tensor, head by head.

Source: transformers `configuration_persimmon.py`, `modeling_persimmon.py`.
"""

from collections.abc import Mapping
from typing import Any

from bridge.families._blocks import (
    PRE_NORMS,
    Rules,
    attention_out,
    head_norms,
    ignore_tied_head,
    norms,
    outside,
    ungated_mlp,
)
from bridge.families._family import Family, Field, KeyMapping, Layers
from bridge.families._field_transform import FieldTransform
from bridge.families._fields import SIZES, tokens
from bridge.families._fused import fused_qkv
from bridge.families._hf_rope import rope
from bridge.models import DecoderConfig, LayerKind


def _layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    del kind
    return (
        *fused_qkv(config, "self_attn.query_key_value"),
        *attention_out(config, "self_attn.dense"),
        *head_norms(config, names=("q_layernorm", "k_layernorm")),
        *ungated_mlp(config, "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        *norms(PRE_NORMS, bias=True),
    )


_SWITCH = "qk_layernorm"


def _read_norms(fields: Mapping[str, Any]) -> dict[str, Any]:
    normed = bool(fields[_SWITCH])
    return {"qk_norm": "head" if normed else None, "qk_norm_bias": normed}


_HEAD_NORMS = FieldTransform(
    (_SWITCH,),
    _read_norms,
    lambda config: {_SWITCH: config.qk_norm is not None},
    {_SWITCH: True},
)
_KEY_HEADS = "num_key_value_heads"


def _read_key_heads(fields: Mapping[str, Any]) -> dict[str, Any]:
    heads, key_heads = fields["num_attention_heads"], fields[_KEY_HEADS]
    if key_heads not in (None, heads):
        raise ValueError(
            f"{_KEY_HEADS} = {key_heads}: transformers has a key head for each of the "
            f"{heads} heads, whatever it says; set it to {heads} or null"
        )
    return {}


# Published files say it, and transformers does not read it.
_ONE_EACH = FieldTransform(
    (_KEY_HEADS,),
    _read_key_heads,
    lambda config: {_KEY_HEADS: config.num_key_value_heads},
    {_KEY_HEADS: None},
)
_NOT_OF_PERSIMMON = ("num_key_value_heads", "head_dim")

FAMILY = Family(
    model_type="persimmon",
    architecture="PersimmonForCausalLM",
    fields={
        **{n: field for n, field in SIZES.items() if n not in _NOT_OF_PERSIMMON},
        **tokens(1, 2),
        "vocab_size": Field(262144),
        "hidden_size": Field(4096),
        "intermediate_size": Field(16384),
        "num_hidden_layers": Field(36),
        "num_attention_heads": Field(64),
        "max_position_embeddings": Field(16384),
        "hidden_act": Field("relu2"),
        "layer_norm_eps": Field(1e-5, "norm_eps"),
    },
    transforms=(rope(partial=0.5), _HEAD_NORMS, _ONE_EACH),
    constants={
        "norm": "layer",
        "norm_bias": True,
        "gated_mlp": False,
        **dict.fromkeys(("attention_bias", "attention_out_bias", "mlp_bias"), True),
    },
    passthrough={"attention_dropout": 0.0, "hidden_dropout": 0.0},
    key_mappings=(
        KeyMapping(
            outside(norm="model.final_layernorm"),
            Layers("model.layers.{layer}.", _layer),
        ),
    ),
    ignore=ignore_tied_head,
)
