"""DeepSeek-V4: hyper-connections, compressed sparse attention, hash-routed experts.

Layers that predict further tokens are left out, as V3's are.

Source: transformers `configuration_deepseek_v4.py`, `modeling_deepseek_v4.py`, and the
names of released tensors in `conversion_mapping.py`.
"""

from bridge.families import _deepseek, _deepseek_v4_fields, _deepseek_v4_rules
from bridge.families._family import Family, Field
from bridge.families._fields import SIZES, moe, tokens

FAMILY = Family(
    model_type="deepseek_v4",
    architecture="DeepseekV4ForCausalLM",
    also_named=("deepseek_ref",),
    fields={
        **{name: field for name, field in SIZES.items() if name != "intermediate_size"},
        **tokens(0, 1),
        "num_key_value_heads": Field(1),
        "head_dim": Field(512),
        "max_position_embeddings": Field(1048576),
        "rms_norm_eps": Field(1e-6, "norm_eps"),
        "sliding_window": Field(128),
        **moe(
            num_experts=("n_routed_experts", 256),
            num_experts_per_tok=("num_experts_per_tok", 6),
            routed_scaling_factor=("routed_scaling_factor", 1.5),
        ),
        "swiglu_limit": Field(10.0, ("swiglu_limit", "moe.swiglu_limit")),
        "moe_intermediate_size": Field(
            2048,
            (
                "intermediate_size",
                "moe.intermediate_size",
                "moe.shared_intermediate_size",
            ),
            ("intermediate_size",),
        ),
        **{
            name: Field(default, f"compressed_attention.{ours}")
            for name, ours, default in (
                ("q_lora_rank", "q_lora_rank", 1024),
                ("o_groups", "o_groups", 8),
                ("o_lora_rank", "o_lora_rank", 1024),
                ("index_n_heads", "index_num_heads", 64),
                ("index_head_dim", "index_head_dim", 128),
                ("index_topk", "index_num_selected", 512),
            )
        },
        "hc_mult": Field(4, "hyper_connections.num_streams"),
        "hc_sinkhorn_iters": Field(20, "hyper_connections.sinkhorn_iters"),
        "hc_eps": Field(1e-6, "hyper_connections.eps"),
    },
    transforms=(
        _deepseek_v4_fields.LAYER_TYPES,
        _deepseek_v4_fields.HASH_LAYERS,
        _deepseek_v4_fields.RATES,
        _deepseek_v4_fields.ROPES,
    ),
    constants={
        "norm": "rms_wide",
        "attention_sinks": True,
        "moe.scoring": "sqrtsoftplus",
        "moe.norm_topk_prob": True,
        "moe.correction_bias": True,
    },
    fixed={
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
    },
    passthrough={
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0,
        _deepseek.FURTHER: 1,
    },
    left_out={_deepseek.FURTHER: 0},
    # How experts are stored.
    inert={"expert_dtype": "fp4"},
    key_mappings=_deepseek_v4_rules.KEY_MAPPINGS,
    ignore=_deepseek_v4_rules.ignore,
)
