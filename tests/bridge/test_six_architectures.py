"""Configs of six published models, as Megatron's, with what verl asserts of each.

Source: verl `tests/special_distributed/test_mcore_config_converter.py`, which runs on
eight processes, since upstream asks the process group for the parallel sizes; ours are
arguments. The configs are written out here, as the models' pages have them.
"""

from __future__ import annotations

import pytest

import bridge
from bridge.megatron import to_transformer_config

pytestmark = pytest.mark.distributed  # not itself, but it is one of upstream's cases

COMMON = {"hidden_act": "silu", "attention_dropout": 0.0, "rms_norm_eps": 1e-6}
QWEN = {"attention_bias": False, "rope_theta": 1e6, "use_sliding_window": False}
CONFIGS = {
    "Qwen2.5-7B": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
    },
    "Qwen3-8B": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        **QWEN,
    },
    "deepseek-coder-1.3b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 32256,
        "hidden_size": 2048,
        "intermediate_size": 5504,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 16384,
        "rope_theta": 100000,
        "rope_scaling": {"type": "linear", "factor": 4.0},
    },
    "Qwen2-57B-A14B": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "vocab_size": 151936,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "moe_intermediate_size": 2560,
        "shared_expert_intermediate_size": 20480,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
    },
    "Qwen3-30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        **QWEN,
    },
    "DeepSeek-V3-Base": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "max_position_embeddings": 163840,
        "rope_theta": 10000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
        "attention_bias": False,
        # As upstream's test: without the layers that predict further tokens.
        "num_nextn_predict_layers": 0,
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_config_has_megatrons_fields(name):
    hf = COMMON | CONFIGS[name]
    sizes = {"tensor_parallel": 2, "context_parallel": 2}
    if hf["num_hidden_layers"] % 2 == 0:
        sizes["pipeline_parallel"] = 2
    fields = to_transformer_config(bridge.from_hf_config(hf), **sizes)
    expected = {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "num_attention_heads": hf["num_attention_heads"],
        "ffn_hidden_size": hf["intermediate_size"],
        "layernorm_epsilon": hf["rms_norm_eps"],
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "tensor_model_parallel_size": 2,
        "context_parallel_size": 2,
    }
    if hf["model_type"] != "deepseek_v3":  # latent attention has no groups
        expected["num_query_groups"] = hf["num_key_value_heads"]
    if "head_dim" in hf:
        expected["kv_channels"] = hf["head_dim"]
    if (experts := hf.get("num_experts", hf.get("n_routed_experts"))) is not None:
        expected["num_moe_experts"] = experts
        expected["moe_ffn_hidden_size"] = hf["moe_intermediate_size"]
        expected["moe_router_topk"] = hf["num_experts_per_tok"]
    assert {field: fields.get(field) for field in expected} == expected
