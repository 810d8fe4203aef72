"""GLM-4.7-Flash: DeepSeek-V3 in other sizes, whose layers say what they are.

Source: transformers `configuration_glm4_moe_lite.py`, `modeling_glm4_moe_lite.py`.
"""

import dataclasses

from bridge.families import _deepseek, deepseek_v3
from bridge.families._family import Field
from bridge.families._fields import moe, tokens
from bridge.families._hf_rope import rope
from bridge.families._layer_types import DENSE_BY_TYPE

FAMILY = dataclasses.replace(
    deepseek_v3.FAMILY,
    model_type="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    also_named=(),
    fields={
        **deepseek_v3.FAMILY.fields,
        **tokens(0, 1),
        **moe(
            num_experts=("n_routed_experts", 64),
            num_experts_per_tok=("num_experts_per_tok", 4),
            intermediate_size=("moe_intermediate_size", 1536),
            routed_scaling_factor=("routed_scaling_factor", 1.8),
            n_group=("n_group", 1),
            topk_group=("topk_group", 1),
        ),
        "num_key_value_heads": Field(20),
        "max_position_embeddings": Field(202752),
        "rms_norm_eps": Field(1e-5, "norm_eps"),
        "q_lora_rank": Field(768, "mla.q_lora_rank"),
        "qk_nope_head_dim": Field(192, "mla.qk_nope_head_dim"),
        "v_head_dim": Field(256, "mla.v_head_dim"),
    },
    transforms=(
        rope(interleaved=True, interleave_field="rope_interleave"),
        DENSE_BY_TYPE,
        _deepseek.shared_experts(1),
        _deepseek.DERIVED_SIZES,
    ),
    passthrough={"output_router_logits": False, _deepseek.FURTHER: 1},
)
