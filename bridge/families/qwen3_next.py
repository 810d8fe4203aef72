"""Qwen3-Next: gated delta nets, gated attention in every fourth layer, and experts.

Source: transformers `configuration_qwen3_next.py`, `modeling_qwen3_next.py`.
"""

from collections.abc import Mapping
from typing import Any

from bridge.families._blocks import Rules, ignore_tied_head
from bridge.families._delta_net import delta_net, gated_attention
from bridge.families._family import Family, Field
from bridge.families._fields import (
    EXPERT_TRAINING,
    SIZES,
    attention_bias,
    moe,
    tokens,
)
from bridge.families._hf_rope import rope
from bridge.families._layer_types import DENSE_BY_STEP, FULL, interval, mixer_types
from bridge.families._sparse import gated_shared, key_mappings_by_kind
from bridge.models import DecoderConfig, LayerKind

LINEAR = "linear_attention"
SIZES_OF_DELTA_NET: Mapping[str, Field] = {
    "linear_num_key_heads": Field(16, "delta_net.num_key_heads"),
    "linear_num_value_heads": Field(32, "delta_net.num_value_heads"),
    "linear_key_head_dim": Field(128, "delta_net.key_head_dim"),
    "linear_value_head_dim": Field(128, "delta_net.value_head_dim"),
    "linear_conv_kernel_dim": Field(4, "delta_net.kernel_size"),
}
_EVERY = "full_attention_interval"


def _read_interval(fields: Mapping[str, Any]) -> list[str]:
    every = interval(fields, _EVERY)
    layers = range(fields["num_hidden_layers"])
    return [LINEAR if (layer + 1) % every else FULL for layer in layers]


LAYER_TYPES = mixer_types({LINEAR: "delta_net"}, _read_interval, {_EVERY: 4})
"""Every so many layers attend, where the file has no `layer_types`."""


def _mixer(config: DecoderConfig, kind: LayerKind) -> Rules:
    mixer = delta_net if kind.mixer == "delta_net" else gated_attention
    return mixer(config)


FAMILY = Family(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    fields={
        **SIZES,
        **SIZES_OF_DELTA_NET,
        **tokens(None, None),
        **attention_bias(),
        **moe(
            num_experts=("num_experts", 512),
            num_experts_per_tok=("num_experts_per_tok", 10),
            intermediate_size=("moe_intermediate_size", 512),
            norm_topk_prob=("norm_topk_prob", True),
            shared_intermediate_size=("shared_expert_intermediate_size", 512),
        ),
        "num_key_value_heads": Field(2),
        "head_dim": Field(256),
        "max_position_embeddings": Field(32768),
        "rms_norm_eps": Field(1e-6, "norm_eps"),
    },
    transforms=(rope(partial=0.25), DENSE_BY_STEP, LAYER_TYPES),
    constants={
        "norm": "rms_zero_centered",
        "qk_norm": "head",
        "attention_gate": True,
        "moe.rounded_weights": True,
        "moe.shared_gate": True,
    },
    fixed={"hidden_act": "silu", "attention_dropout": 0.0},
    passthrough=EXPERT_TRAINING,
    key_mappings=key_mappings_by_kind(_mixer, gated_shared),
    ignore=ignore_tied_head,
)
