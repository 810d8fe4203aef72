"""MiniMax M2: a sigmoid router with a correction bias, all heads normed as one.

Source: transformers `configuration_minimax_m2.py`, `modeling_minimax_m2.py`.
"""

from collections.abc import Mapping
from typing import Any

from bridge.families._blocks import (
    PRE_NORMS,
    Rules,
    attention,
    experts,
    ignore_tied_head,
    key_mapping,
    norms,
    router,
)
from bridge.families._family import Family, Field
from bridge.families._field_transform import FieldTransform
from bridge.families._fields import EXPERT_TRAINING, SIZES, moe, tokens
from bridge.families._hf_rope import rope_of_dims
from bridge.models import DecoderConfig, LayerKind
from bridge.rules._rules import Rule

_AT = "block_sparse_moe."
_EXPERTS = (
    *router(_AT + "gate"),
    *experts(_AT + "experts.{expert}.", gate="w1", up="w3", down="w2"),
    Rule(
        _AT + "e_score_correction_bias",
        "mlp.router.correction_bias",
        "experts -> experts",
    ),
)


def _layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    del kind
    return attention(config) + _EXPERTS + norms(PRE_NORMS)


def _check_attention(fields: Mapping[str, Any]) -> dict[str, Any]:
    kinds = fields[_KINDS]
    if kinds is not None and set(kinds) != {1}:
        raise ValueError(f"{_KINDS} = {kinds!r}: only 1, for full layers, is modelled")
    return {}


_KINDS = "attn_type_list"

FAMILY = Family(
    model_type="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    fields={
        **SIZES,
        **tokens(200034, 200020),
        **moe(
            num_experts=("num_local_experts", 256),
            num_experts_per_tok=("num_experts_per_tok", 8),
        ),
        # All layers are sparse, so this is the width of an expert.
        "intermediate_size": Field(
            1536, ("intermediate_size", "moe.intermediate_size")
        ),
        "num_key_value_heads": Field(8),
        "head_dim": Field(128),
        "max_position_embeddings": Field(196608),
        "rms_norm_eps": Field(1e-6, "norm_eps"),
    },
    transforms=(
        rope_of_dims(5000000.0),
        FieldTransform((_KINDS,), _check_attention, lambda config: {}, {_KINDS: None}),
    ),
    constants={
        "qk_norm": "full",
        "moe.scoring": "sigmoid",
        "moe.norm_topk_prob": True,
        "moe.correction_bias": True,
    },
    fixed={"hidden_act": "silu", "attention_dropout": 0.0},
    # Noise on what enters the router, in training alone.
    passthrough={**EXPERT_TRAINING, "router_jitter_noise": 0.0},
    # Of published files, which name remote code: what transformers' own has always.
    inert={
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "use_routing_bias": True,
        "scoring_func": "sigmoid",
        "use_mtp": True,
        "mtp_transformer_layers": 1,
        "num_mtp_modules": 3,
    },
    key_mappings=(key_mapping(_layer),),
    ignore=ignore_tied_head,
)
