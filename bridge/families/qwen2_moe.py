"""Qwen1.5-MoE and Qwen2-MoE: a gated shared expert, weights not renormalised.

Source: transformers `configuration_qwen2_moe.py`, `modeling_qwen2_moe.py`.
"""

from bridge.families._blocks import ignore_tied_head
from bridge.families._family import Family, Field
from bridge.families._fields import EXPERT_TRAINING, SIZES, moe, tokens
from bridge.families._hf_rope import rope
from bridge.families._layer_types import DENSE_BY_STEP, switched_window
from bridge.families._sparse import gated_shared, key_mappings

FAMILY = Family(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    fields={
        **SIZES,
        **tokens(None, None),
        **moe(
            num_experts=("num_experts", 60),
            num_experts_per_tok=("num_experts_per_tok", 4),
            intermediate_size=("moe_intermediate_size", 1408),
            norm_topk_prob=("norm_topk_prob", False),
            shared_intermediate_size=("shared_expert_intermediate_size", 5632),
        ),
        "num_key_value_heads": Field(16),
        "max_position_embeddings": Field(32768),
        "rms_norm_eps": Field(1e-6, "norm_eps"),
        "qkv_bias": Field(True, "attention_bias"),
    },
    transforms=(
        rope(),
        DENSE_BY_STEP,
        switched_window(
            lambda layer, fields: layer % 2 == 0 and layer < fields["max_window_layers"]
        ),
    ),
    constants={"moe.rounded_weights": True, "moe.shared_gate": True},
    fixed={"hidden_act": "silu", "attention_dropout": 0.0},
    passthrough={**EXPERT_TRAINING, "max_window_layers": 28},
    key_mappings=key_mappings(beside=gated_shared),
    ignore=ignore_tied_head,
)
