"""OLMoE: all heads normed as one, weights not renormalised.

Source: transformers `configuration_olmoe.py`, `modeling_olmoe.py`.
"""

from bridge.families._blocks import ignore_tied_head
from bridge.families._family import Family, Field
from bridge.families._fields import (
    EXPERT_TRAINING,
    SIZES,
    attention_bias,
    moe,
    tokens,
)
from bridge.families._hf_rope import rope
from bridge.families._sparse import key_mappings

FAMILY = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    fields={
        **SIZES,
        **tokens(None, 50279, 1),
        **attention_bias(),
        **moe(
            num_experts=("num_experts", 64),
            num_experts_per_tok=("num_experts_per_tok", 8),
            norm_topk_prob=("norm_topk_prob", False),
        ),
        # All layers are sparse, so this is the width of an expert.
        "intermediate_size": Field(
            2048, ("intermediate_size", "moe.intermediate_size")
        ),
        "max_position_embeddings": Field(4096),
        "rms_norm_eps": Field(1e-5, "norm_eps"),
        "clip_qkv": Field(None),
    },
    transforms=(rope(),),
    constants={"qk_norm": "full", "moe.rounded_weights": True},
    fixed={"hidden_act": "silu", "attention_dropout": 0.0},
    passthrough={**EXPERT_TRAINING, "router_aux_loss_coef": 0.01},
    key_mappings=key_mappings(),
    ignore=ignore_tied_head,
)
