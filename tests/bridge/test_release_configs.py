"""Config files as releases write them, whose own code has other names and fields."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.errors import facts
from tiny_configs import YARN_ROPE, hf_fields

import bridge

# What a release says besides, or in place of, what transformers writes.
_ALIKE: dict[str, dict[str, Any]] = {
    "helium": {"pretraining_tp": 1},
    "deepseek_v4": {
        "expert_dtype": "fp4",
        "qk_rope_head_dim": 8,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
    },
    "exaone": {"embed_dropout": 0.0},
    "exaone_moe": {
        "architectures": ["ExaoneMoEForCausalLM"],
        "first_last_k_dense_replace": 1,
        "is_moe_layer": [False, True],
        "scoring_func": "sigmoid",
        "sliding_window_pattern": "LLLG",
        "topk_method": "noaux_tc",
    },
    "afmoe": {
        "n_group": 1,
        "num_expert_groups": 1,
        "num_limited_groups": 1,
        "route_norm": True,
        "score_func": "sigmoid",
        "topk_group": 1,
        "use_grouped_mm": True,
    },
    "hy_v3": {
        "enable_lm_head_fp32": True,
        "expert_hidden_dim": 24,
        "first_k_dense_replace": 1,
        "moe_router_enable_expert_bias": True,
        "moe_router_use_sigmoid": True,
        "qk_norm": True,
        "route_norm": True,
        "use_grouped_mm": False,
    },
    "dbrx": {
        "attn_config": {
            **{"clip_qkv": 1.5, "kv_n_heads": 2, "rope_theta": 500},
            "model_type": "",
        },
        "ffn_config": {
            **{"ffn_hidden_size": 24, "moe_num_experts": 8, "moe_top_k": 3},
            **{"model_type": "", "moe_jitter_eps": 0, "moe_loss_weight": 0.05},
        },
        "rope_parameters": None,
    },
    "codegen": {
        **{"gradient_checkpointing": False, "scale_attn_weights": True},
        **{"summary_activation": None, "summary_first_dropout": 0.1},
        **{"summary_proj_to_labels": True, "summary_type": "cls_index"},
        "summary_use_proj": True,
    },
    "mellum": {"max_window_layers": 0, "use_sliding_window": True},
    "sarvam_moe": {"score_function": "sigmoid", "use_qkv_bias": True},
    "sarvam_mla": {"head_dim": 24, "q_head_dim": 18},  # of a cached row, and derived
    "solar_open": {"first_k_dense_replace": 0, "use_qk_norm": False},
    "youtu": {"embedding_initializer_range": 0.02},
}


@pytest.mark.parametrize("variant", _ALIKE)
def test_what_a_release_says_besides_changes_nothing(variant):
    fields = hf_fields(variant)
    assert bridge.from_hf_config(fields | _ALIKE[variant]) == bridge.from_hf_config(
        fields
    )


def test_a_release_s_own_names_are_read():
    fields = hf_fields("exaone")
    own = {
        "num_layers": fields.pop("num_hidden_layers"),
        "activation_function": "silu",
        "layer_norm_epsilon": 1e-3,
    }
    assert bridge.from_hf_config(fields | own).norm_eps == 1e-3
    fields = hf_fields("sarvam_moe", num_shared_experts=2)
    moe = bridge.from_hf_config(fields).moe
    assert moe is not None and moe.shared_intermediate_size == 48


def test_yarn_by_a_release_s_name_is_yarn():
    fields = hf_fields("sarvam_mla")
    del fields["rope_parameters"]
    scaling = {**YARN_ROPE, "type": "deepseek_yarn"}
    del scaling["rope_type"]
    rope = bridge.from_hf_config(fields | {"rope_scaling": scaling}).rope
    assert rope is not None and (rope.rope_type, rope.factor) == ("yarn", 8.0)


@pytest.mark.parametrize(
    "variant, changes, match",
    [
        ("minimax_m2", {"partial_rotary_factor": None}, ["None", "rotary_dim", "16"]),
        ("cwm", {"rope_theta": 5e5}, ["rope_theta = 500000.0", "1000000.0"]),
        ("bamba", {"partial_rotary_factor": 0.25}, ["0.25", "rope_parameters"]),
        ("bamba", {"attn_layer_indices": [1, 4]}, ["attn_layer_indices", "[4]", "4"]),
        ("exaone_moe", {"is_moe_layer": [True, True]}, ["is_moe_layer", "False"]),
        ("gpt_neo", {"attention_types": [[["global"], 2]]}, ["attention_types", "3"]),
        ("gpt_neo", {"attention_layers": ["local"] * 3}, ["attention_layers"]),
        ("granite_swa", {"layer_rope_theta": [1.0]}, ["layer_rope_theta", "1", "4"]),
        (
            "granite_swa",
            {"layer_rope_theta": [1.0, 2.0, 3.0, 2.0]},
            ["layer_rope_theta", "full_attention"],
        ),
        ("sarvam_mla", {"head_dim": 7}, ["head_dim = 7", "8"]),
        ("hy_v3", {"first_k_dense_replace": 2}, ["first_k_dense_replace"]),
    ],
)
def test_what_transformers_reads_otherwise_is_refused(variant, changes, match):
    with pytest.raises(ValueError, match=facts(*match)):
        bridge.from_hf_config(hf_fields(variant) | changes)
