"""Solar Open: GLM-4.5 of sparse layers alone, whose heads rotate as a whole.

Source: transformers `configuration_solar_open.py`, `modeling_solar_open.py`.
"""

from bridge.families import _deepseek
from bridge.families._blocks import attention, ignore_tied_head
from bridge.families._family import Family, Field
from bridge.families._fields import SIZES, attention_bias, moe, tokens
from bridge.families._hf_rope import rope
from bridge.families._sparse import key_mappings

_DENSE = "intermediate_size"

FAMILY = Family(
    model_type="solar_open",
    architecture="SolarOpenForCausalLM",
    fields={
        **{name: field for name, field in SIZES.items() if name != _DENSE},
        **tokens(None, None),
        **attention_bias(out=False),
        **moe(
            num_experts=("n_routed_experts", 128),
            num_experts_per_tok=("num_experts_per_tok", 8),
            norm_topk_prob=("norm_topk_prob", True),
            routed_scaling_factor=("routed_scaling_factor", 1.0),
            n_group=("n_group", 1),
            topk_group=("topk_group", 1),
        ),
        # All layers are sparse, so no other width is read.
        "moe_intermediate_size": Field(1280, (_DENSE, "moe.intermediate_size")),
        "num_key_value_heads": Field(8),
        "head_dim": Field(128),
        "max_position_embeddings": Field(131072),
        "rms_norm_eps": Field(1e-5, "norm_eps"),
    },
    transforms=(rope(1e6, partial=1.0), _deepseek.shared_experts(1)),
    constants=_deepseek.SIGMOID_ROUTER,
    fixed={"hidden_act": "silu", "attention_dropout": 0.0},
    passthrough={"output_router_logits": False, _DENSE: None},
    # Of published files: what the model has always.
    inert={"first_k_dense_replace": 0, "use_qk_norm": False},
    key_mappings=key_mappings(attention, _deepseek.corrected_and_shared),
    ignore=ignore_tied_head,
)
