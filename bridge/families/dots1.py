"""dots.llm1: attention of Qwen3, experts and router of DeepSeek-V3.

Source: transformers `configuration_dots1.py`, `modeling_dots1.py`.
"""

from bridge.families import _deepseek
from bridge.families._blocks import attention, ignore_tied_head
from bridge.families._family import REQUIRED, Family, Field
from bridge.families._fields import SIZES, attention_bias, moe, tokens
from bridge.families._hf_rope import rope
from bridge.families._layer_types import first_dense, window_from
from bridge.families._sparse import key_mappings

FAMILY = Family(
    model_type="dots1",
    architecture="Dots1ForCausalLM",
    fields={
        **SIZES,
        **tokens(None, None),
        **attention_bias(),
        **moe(
            num_experts=("n_routed_experts", REQUIRED),
            num_experts_per_tok=("num_experts_per_tok", REQUIRED),
            intermediate_size=("moe_intermediate_size", 1408),
            norm_topk_prob=("norm_topk_prob", False),
            routed_scaling_factor=("routed_scaling_factor", 1.0),
            n_group=("n_group", 1),
            topk_group=("topk_group", 1),
        ),
        "num_key_value_heads": Field(32),
        "max_position_embeddings": Field(2048),
        "rms_norm_eps": Field(1e-6, "norm_eps"),
    },
    transforms=(
        rope(),
        first_dense(0),
        _deepseek.shared_experts(None),
        window_from("max_window_layers", 62),
    ),
    constants={**_deepseek.SIGMOID_ROUTER, "qk_norm": "head"},
    fixed={"hidden_act": "silu", "attention_dropout": 0.0},
    passthrough={"output_router_logits": False},
    key_mappings=key_mappings(attention, _deepseek.corrected_and_shared),
    ignore=ignore_tied_head,
)
