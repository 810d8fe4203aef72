"""Flint: sparse layers of Qwen3-MoE, with sinks, and a rope where layers slide.

Source: transformers `configuration_flint.py`, `modeling_flint.py`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from bridge.families._blocks import Rules, attention, ignore_tied_head, mlp
from bridge.families._family import Family, Field
from bridge.families._fields import (
    EXPERT_TRAINING,
    SIZES,
    attention_bias,
    moe,
    tokens,
)
from bridge.families._hf_rope import rope
from bridge.families._layer_types import (
    FULL,
    SLIDING,
    dense_by_step,
    sliding_or_full_without_rope,
)
from bridge.families._sparse import key_mappings
from bridge.models import DecoderConfig
from bridge.rules._rules import Rule


def _attention(sinks: str) -> Callable[[DecoderConfig], Rules]:
    rule = Rule(f"self_attn.{sinks}", "self_attn.sinks", "heads -> heads")
    return lambda config: (*attention(config), rule)


def _shared(config: DecoderConfig) -> Rules:
    at = "mlp.shared_expert."
    return mlp(config, at, at, "shared_mlp")


def _absent(fields: Mapping[str, Any]) -> list[str]:
    last = fields["num_hidden_layers"] - 1
    full = (i < 2 or i % 4 == 1 or i == last for i in range(last + 1))
    return [FULL if is_full else SLIDING for is_full in full]


FAMILY = Family(
    model_type="flint",
    architecture="FlintForCausalLM",
    fields={
        **SIZES,
        **tokens(None, None),
        **attention_bias(),
        **moe(
            num_experts=("num_experts", 256),
            num_experts_per_tok=("num_experts_per_tok", 6),
            intermediate_size=("moe_intermediate_size", 512),
            norm_topk_prob=("norm_topk_prob", True),
            shared_intermediate_size=("shared_expert_intermediate_size", 1024),
        ),
        "num_key_value_heads": Field(4),
        "head_dim": Field(128),
        "max_position_embeddings": Field(262144),
        "rms_norm_eps": Field(1e-6, "norm_eps"),
        "sliding_window": Field(513),
    },
    transforms=(
        rope(),
        sliding_or_full_without_rope(_absent),
        dense_by_step((0, 1)),
    ),
    constants={
        "norm": "rms_wide",
        "qk_norm": "head",
        "attention_sinks": True,
        "moe.scoring": "sigmoid",
        "moe.norm_topk_eps": 0.0,
        "moe.float32_logits": True,
    },
    fixed={"hidden_act": "silu", "attention_dropout": 0.0},
    passthrough={**EXPERT_TRAINING, "router_aux_loss_coef": 0.0005},
    # Files have a name of their own for the sinks.
    key_mappings=(
        key_mappings(_attention("softmax_offset"), _shared)[0],
        key_mappings(_attention("sinks"), _shared)[1],
    ),
    ignore=ignore_tied_head,
)
