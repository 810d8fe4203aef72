"""Doge: keys with a bias made of their values, learned factors of the stream.

Experts (`is_moe`) are refused: transformers mixes their logits across tokens, so that a
token would see those behind it.

Source: transformers `configuration_doge.py`, `modeling_doge.py`.
"""

from bridge.families._blocks import (
    Rules,
    dense_layer,
    ignore_tied_head,
    key_mapping,
    linear,
)
from bridge.families._family import Family, Field
from bridge.families._fields import EXPERT_TRAINING, SIZES, attention_bias, tokens
from bridge.families._hf_rope import rope
from bridge.families._layer_types import window_of_all
from bridge.models import DecoderConfig, LayerKind
from bridge.rules._rules import Rule

_FACTORS: Rules = (
    Rule("input_residual", "mixer_factors.scale", "embed -> embed"),
    Rule("post_attention_residual", "mlp_factors.scale", "embed -> embed"),
)


def _layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    heads = "kv_head -> kv_head"
    steps = linear(
        "self_attn.dt_proj",
        "self_attn.step_proj",
        "kv_head (kv_heads head_dim) -> kv_heads head_dim kv_head",
        heads if config.attention_bias else None,
    )
    factor = Rule("self_attn.A", "self_attn.step_factor", heads)
    return (*dense_layer(config, kind), *steps, factor, *_FACTORS)


FAMILY = Family(
    model_type="doge",
    architecture="DogeForCausalLM",
    fields={
        **SIZES,
        **tokens(None, None),
        **attention_bias(),
        "vocab_size": Field(32768),
        "hidden_size": Field(1024),
        "intermediate_size": Field(2048),
        "num_hidden_layers": Field(32),
        "num_attention_heads": Field(8),
        "max_position_embeddings": Field(2048),
        "rms_norm_eps": Field(1e-6, "norm_eps"),
        "hidden_act": Field("silu"),
        "mlp_bias": Field(False),
        "keep_window_size": Field(2048, "dynamic_mask_size"),
    },
    transforms=(rope(), window_of_all()),
    constants={"qk_norm": "head", "learned_residual": True},
    fixed={"is_moe": False},
    # Sizes of experts, which a dense model has too.
    passthrough={
        **EXPERT_TRAINING,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "num_experts": 16384,
        "num_experts_per_tok": 64,
        "norm_topk_prob": False,
    },
    key_mappings=(key_mapping(_layer),),
    ignore=ignore_tied_head,
)
