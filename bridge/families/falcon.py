"""Falcon 7B, 40B, 180B and 11B: attention and MLP side by side.

The first (7B) has one head of keys and values for all, the others (the *new decoder
architecture*) one for a group of heads, and two norms but for the 11B's one. Models
with ALiBi (RW) are refused.

Source: transformers `configuration_falcon.py`, `modeling_falcon.py`.
"""

from collections.abc import Mapping
from typing import Any

from bridge.families._blocks import (
    PRE_NORMS,
    Rules,
    attention_out,
    ignore_tied_head,
    norms,
    outside,
    ungated_mlp,
)
from bridge.families._family import Family, Field, KeyMapping, Layers
from bridge.families._field_transform import FieldTransform
from bridge.families._fields import tokens
from bridge.families._fused import fused_qkv
from bridge.families._hf_rope import rope
from bridge.models import DecoderConfig, LayerKind

_NORMS = {
    "parallel": {"input_layernorm": "input_layernorm"},
    "parallel_two": {
        "ln_attn": "input_layernorm",
        "ln_mlp": "pre_feedforward_layernorm",
    },
    "pre": PRE_NORMS,
}


def _layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    del kind
    at = "self_attention."
    return (
        *fused_qkv(config, at + "query_key_value"),
        *attention_out(config, at + "dense"),
        *ungated_mlp(config, "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        *norms(_NORMS[config.norm_placement], bias=True),
    )


_ARCHITECTURE = {
    "new_decoder_architecture": False,
    "multi_query": True,
    "parallel_attn": True,
    "num_kv_heads": None,
    "num_ln_in_parallel_attn": None,
}


def _read_architecture(fields: Mapping[str, Any]) -> dict[str, Any]:
    new, count = fields["new_decoder_architecture"], fields["num_kv_heads"]
    heads, side_by_side = fields["num_attention_heads"], fields["parallel_attn"]
    norm_count = fields["num_ln_in_parallel_attn"]
    if new:
        two = norm_count in (None, 2)
        if not side_by_side or norm_count not in (None, 1, 2):
            raise ValueError(
                f"parallel_attn = {side_by_side!r}, num_ln_in_parallel_attn = "
                f"{norm_count!r}: the new architecture has 1 or 2 norms, side by side"
            )
        placement = "parallel_two" if two else "parallel"
        kv_heads = heads if count is None else count
    else:
        placement = "parallel" if side_by_side else "pre"
        kv_heads = 1 if fields["multi_query"] else heads
        if norm_count == 2 and side_by_side:
            raise ValueError(
                "num_ln_in_parallel_attn = 2: only of the new decoder architecture"
            )
    return {"num_key_value_heads": kv_heads, "norm_placement": placement}


def _write_architecture(config: DecoderConfig) -> dict[str, Any]:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    placement = config.norm_placement
    new = placement == "parallel_two" or kv_heads not in (1, heads)
    return {
        "new_decoder_architecture": new,
        "multi_query": kv_heads == 1,
        "parallel_attn": placement != "pre",
        "num_kv_heads": kv_heads,
        "num_ln_in_parallel_attn": 1 + (placement == "parallel_two") if new else None,
    }


def _read_width(fields: Mapping[str, Any]) -> dict[str, Any]:
    width = fields["ffn_hidden_size"]
    return {"intermediate_size": 4 * fields["hidden_size"] if width is None else width}


_WIDTH = FieldTransform(
    ("ffn_hidden_size",),
    _read_width,
    lambda config: {"ffn_hidden_size": config.intermediate_size},
    {"ffn_hidden_size": None},
)

FAMILY = Family(
    model_type="falcon",
    architecture="FalconForCausalLM",
    fields={
        **tokens(11, 11),
        "vocab_size": Field(65024),
        "hidden_size": Field(4544),
        "num_hidden_layers": Field(32),
        "num_attention_heads": Field(71),
        "layer_norm_epsilon": Field(1e-5, "norm_eps"),
        "initializer_range": Field(0.02),
        "max_position_embeddings": Field(2048),
        "activation": Field("gelu", "hidden_act"),
        "bias": Field(False, ("attention_bias", "attention_out_bias", "mlp_bias")),
        "tie_word_embeddings": Field(True),
    },
    transforms=(
        rope(),
        _WIDTH,
        FieldTransform(
            tuple(_ARCHITECTURE), _read_architecture, _write_architecture, _ARCHITECTURE
        ),
    ),
    constants={"norm": "layer", "norm_bias": True, "gated_mlp": False},
    fixed={"alibi": False},
    passthrough={"attention_dropout": 0.0, "hidden_dropout": 0.0},
    key_mappings=(
        KeyMapping(
            outside("transformer.word_embeddings", "transformer.ln_f"),
            Layers("transformer.h.{layer}.", _layer),
        ),
    ),
    ignore=ignore_tied_head,
)
