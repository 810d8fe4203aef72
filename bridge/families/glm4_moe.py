"""GLM-4.5, 4.6 and 4.7: the router of DeepSeek-V3, and half of each head rotary.

The layers that predict further tokens are left out; see `deepseek_v3`.

Source: transformers `configuration_glm4_moe.py`, `modeling_glm4_moe.py`.
"""

from bridge.families import _deepseek
from bridge.families._blocks import attention
from bridge.families._family import Family, Field
from bridge.families._fields import (
    SIZES,
    attention_bias,
    moe,
    qk_norm_switch,
    tokens,
)
from bridge.families._hf_rope import rope
from bridge.families._layer_types import first_dense
from bridge.families._sparse import key_mappings

FAMILY = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    also_named=("glm4v_moe_text",),  # text part of GLM-4.5V and GLM-4.6V
    fields={
        **SIZES,
        **tokens(None, None),
        **attention_bias(out=False),
        **moe(
            num_experts=("n_routed_experts", 128),
            num_experts_per_tok=("num_experts_per_tok", 8),
            intermediate_size=("moe_intermediate_size", 1408),
            norm_topk_prob=("norm_topk_prob", True),
            routed_scaling_factor=("routed_scaling_factor", 1.0),
            n_group=("n_group", 1),
            topk_group=("topk_group", 1),
        ),
        "num_key_value_heads": Field(8),
        "max_position_embeddings": Field(131072),
        "rms_norm_eps": Field(1e-5, "norm_eps"),
    },
    transforms=(
        rope(partial=0.5),
        first_dense(1),
        _deepseek.shared_experts(1),
        qk_norm_switch("use_qk_norm", "head"),
    ),
    constants=_deepseek.SIGMOID_ROUTER,
    fixed={"hidden_act": "silu", "attention_dropout": 0.0},
    passthrough={"output_router_logits": False, _deepseek.FURTHER: 1},
    aliases={"num_mtp_layers": _deepseek.FURTHER},
    left_out={_deepseek.FURTHER: 0},
    key_mappings=key_mappings(attention, _deepseek.corrected_and_shared),
    ignore=_deepseek.ignore_further,
)
