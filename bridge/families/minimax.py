"""MiniMax-Text-01: lightning attention in all layers but some, norms in the stream.

Files hold decays that follow from the config: an import leaves them out, and
transformers computes them anew of an export.

Source: transformers `configuration_minimax.py`, `modeling_minimax.py`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from bridge.families import mixtral
from bridge.families._blocks import (
    PRE_NORMS,
    Rules,
    attention,
    ignore_tied_head,
    key_mapping,
    linear,
    norms,
)
from bridge.families._family import Family, Field
from bridge.families._fields import EXPERT_TRAINING, SIZES, moe, tokens
from bridge.families._hf_rope import rope
from bridge.families._layer_types import FULL, mixer_types
from bridge.models import DecoderConfig, LayerKind
from bridge.rules._rules import Rule

_LINEAR = "linear_attention"
_HEADS = "(heads head_dim) embed -> embed heads head_dim"
_LIGHTNING: Rules = (
    Rule(
        "self_attn.qkv_proj.weight",
        tuple(f"lightning.{name}_proj.kernel" for name in "qkv"),
        (_HEADS, _HEADS, _HEADS),
        repeat="heads",
    ),
    *linear("self_attn.output_gate", "lightning.z_proj", _HEADS),
    Rule(
        "self_attn.norm.weight",
        "lightning.norm.scale",
        "(heads head_dim) -> heads head_dim",
    ),
    *linear(
        "self_attn.out_proj",
        "lightning.o_proj",
        "embed (heads head_dim) -> heads head_dim embed",
    ),
)


def _layer(inner: Rules) -> Callable[[DecoderConfig, LayerKind], Rules]:
    def rules(config: DecoderConfig, kind: LayerKind) -> Rules:
        mixer = _LIGHTNING if kind.mixer == "lightning" else attention(config)
        return mixer + inner + norms(PRE_NORMS)

    return rules


def _absent(fields: Mapping[str, Any]) -> list[str]:
    return [_LINEAR if i % 2 else FULL for i in range(fields["num_hidden_layers"])]


def _ignore(config: DecoderConfig) -> tuple[str, ...]:
    """The decays of lightning attention, and a tied head."""
    decays = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
    named = tuple(f"model.layers.{{layer}}.self_attn.{name}" for name in decays)
    return named + ignore_tied_head(config)


FAMILY = Family(
    model_type="minimax",
    architecture="MiniMaxForCausalLM",
    fields={
        **SIZES,
        **tokens(1, 2),
        **moe(
            num_experts=("num_local_experts", 8),
            num_experts_per_tok=("num_experts_per_tok", 2),
        ),
        "intermediate_size": Field(
            14336, ("intermediate_size", "moe.intermediate_size")
        ),
        "num_key_value_heads": Field(8),
        "max_position_embeddings": Field(4096 * 32),
        "rms_norm_eps": Field(1e-5, "norm_eps"),
        "full_attn_alpha_factor": Field(1, "residual_factors.attention_stream"),
        "full_attn_beta_factor": Field(1, "residual_factors.attention_output"),
        "linear_attn_alpha_factor": Field(1, "lightning.stream_factor"),
        "linear_attn_beta_factor": Field(1, "lightning.output_factor"),
        "mlp_alpha_factor": Field(1, "residual_factors.mlp_stream"),
        "mlp_beta_factor": Field(1, "residual_factors.mlp_output"),
    },
    transforms=(
        rope(1e6),
        mixer_types({_LINEAR: "lightning"}, _absent),
    ),
    constants={"moe.norm_topk_prob": True, "norm_placement": "in_stream"},
    fixed={"hidden_act": "silu", "attention_dropout": 0.0, "sliding_window": None},
    # The noise is that of training. Blocks of any size give the same sums.
    passthrough={**EXPERT_TRAINING, "router_jitter_noise": 0.0, "block_size": 256},
    key_mappings=(
        key_mapping(_layer(mixtral.SPLIT)),
        key_mapping(_layer(mixtral.FUSED)),
    ),
    ignore=_ignore,
)
