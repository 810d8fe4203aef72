"""Config files of tiny models, of every family, as plain data without torch."""

from typing import Any

SIZES = {
    "vocab_size": 131,  # odd, so that nothing divides it
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # Short, so that a 40-token text meets all three bands of wavelengths.
    "original_max_position_embeddings": 32,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 32,
}
DEEPSEEK_ROPE = YARN_ROPE | {"mscale": 0.707, "mscale_all_dim": 0.9}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2],
    "long_factor": [1.5, 3.0, 9.0],
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "rope_parameters": DEEPSEEK_ROPE,
    # Not what the latent vectors are normed with.
    "rms_norm_eps": 1e-3,
}
INDEXER = {"index_n_heads": 16, "index_head_dim": 16, "index_topk": 10}
OF_MINICPM3 = (
    *("num_key_value_heads", "kv_lora_rank", "q_lora_rank", "rms_norm_eps"),
    *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
)
DELTA_NET = {
    "head_dim": 16,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
}
NEMOTRON = {
    "head_dim": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 14,  # 4 * 14 is not a multiple of the hidden size
    "n_groups": 2,
    "ssm_state_size": 10,
    "chunk_size": 16,
}
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_state": 10,
    "mamba_chunk_size": 16,
}
WINDOW = {"sliding_window": 9}
FULL_HEADS = {
    "head_dim": 12,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    **WINDOW,
}
TWO = {"num_hidden_layers": 2}
ALTERNATING = {
    **TWO,
    **WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}
GPT2_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": None,
    "num_key_value_heads": None,
}
_NO_ATTENTION = dict.fromkeys(
    (
        *("intermediate_size", "num_attention_heads", "num_key_value_heads"),
        "max_position_embeddings",
    )
)
# Families whose files have names of their own; None for fields that they lack.
OWN_NAMES: dict[str, dict[str, str | None]] = {
    "gpt2": GPT2_NAMES,
    "qwen3_5_moe_text": {"intermediate_size": None},
    "gptj": GPT2_NAMES,
    "gpt_bigcode": GPT2_NAMES,
    "gpt_neox": {"num_key_value_heads": None},
    "bloom": {
        "intermediate_size": None,
        "num_key_value_heads": None,
        "max_position_embeddings": None,
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
    },
    "mpt": {
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "max_position_embeddings": "max_seq_len",
        "intermediate_size": None,
        "num_key_value_heads": None,
    },
    "mamba": _NO_ATTENTION,
    "mamba2": _NO_ATTENTION,
    "falcon": {"intermediate_size": "ffn_hidden_size", "num_key_value_heads": None},
    "opt": {"intermediate_size": "ffn_dim", "num_key_value_heads": None},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    # 6 * 32 is not the hidden size
    "llama-wide-heads": {
        "model_type": "llama",
        "head_dim": 32,
        "num_attention_heads": 6,
    },
    "llama-llama3-rope": {"model_type": "llama", "rope_parameters": LLAMA3_ROPE},
    "llama-linear-rope": {"model_type": "llama", "rope_parameters": LINEAR_ROPE},
    "llama-biased": {
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "eos_token_id": [2, 7],
    },
    "mistral": {"model_type": "mistral", **WINDOW, "head_dim": 16},
    "mistral-full": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2"},
    "qwen2-yarn": {"model_type": "qwen2", "rope_parameters": YARN_ROPE},
    "qwen2-sliding": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
        **WINDOW,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "gemma2": {
        "model_type": "gemma2",
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 2.0,  # within what the scores reach
        **WINDOW,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "query_pre_attn_scalar": 20,
        "layer_types": [
            "sliding_attention",
            "full_attention",
            "sliding_attention",
        ],
        "rope_parameters": {
            "full_attention": {**LINEAR_ROPE, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        **WINDOW,
    },
    "gemma4": {
        "model_type": "gemma4_text",
        **FULL_HEADS,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    },
    "gemma4-experts": {
        "model_type": "gemma4_text",
        **FULL_HEADS,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 20,
    },
    "phi3": {"model_type": "phi3"},
    "phi3-longrope-short": {
        "model_type": "phi3",
        "rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.5},
        "original_max_position_embeddings": 64,
    },
    "phi3-longrope-long": {
        "model_type": "phi3",
        "rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.5},
        "original_max_position_embeddings": 32,
        **WINDOW,
    },
    "gpt2": {"model_type": "gpt2"},
    "gpt2-untied": {
        "model_type": "gpt2",
        "tie_word_embeddings": False,
        "n_inner": 80,
        "activation_function": "gelu",
    },
    "olmo2": {"model_type": "olmo2"},
    "olmo3": {"model_type": "olmo3", "num_hidden_layers": 4, **WINDOW},
    "smollm3": {"model_type": "smollm3", "num_hidden_layers": 4},
    "granite": {
        "model_type": "granite",
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.3,
        "logits_scaling": 0.7,
    },
    "cohere": {"model_type": "cohere", "logit_scale": 0.3},
    "cohere-qk-norm": {
        "model_type": "cohere",
        "use_qk_norm": True,
        "logit_scale": 0.83,
    },
    "glm4": {"model_type": "glm4", "head_dim": 16},
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        **EXPERTS,
        "shared_expert_intermediate_size": 40,
    },
    "qwen2_moe-mixed": {
        "model_type": "qwen2_moe",
        **EXPERTS,
        "shared_expert_intermediate_size": 40,
        "num_hidden_layers": 4,
        "decoder_sparse_step": 2,
        "norm_topk_prob": True,
    },
    "olmoe": {
        "model_type": "olmoe",
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "clip_qkv": 1.5,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **EXPERTS,
        "head_dim": 16,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "mixtral": {
        "model_type": "mixtral",
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "head_dim": 16,
        "rope_parameters": {**YARN_ROPE, "truncate": False},
        **WINDOW,
    },
    "deepseek_v2": {"model_type": "deepseek_v2", **LATENT},
    "deepseek_v2-lite": {
        "model_type": "deepseek_v2",
        **LATENT,
        "q_lora_rank": None,
        "n_shared_experts": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "minicpm3": {
        "model_type": "minicpm3",
        **{name: size for name, size in LATENT.items() if name in OF_MINICPM3},
        "rope_parameters": {
            **LONGROPE,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [1.5, 3.0, 9.0, 9.5],
            "original_max_position_embeddings": 32,
        },
        "scale_emb": 3,
        "scale_depth": 0.7,
        "dim_model_base": 40,
    },
    "deepseek_v2-groups": {
        "model_type": "deepseek_v2",
        **LATENT,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **LATENT,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 2,
        # An export announces none, and tests compare configs before and after.
        "num_nextn_predict_layers": 0,
    },
    "deepseek_v32": {
        "model_type": "deepseek_v32",
        **LATENT,
        **INDEXER,
        "n_group": 4,
        "topk_group": 2,
        "num_nextn_predict_layers": 0,
    },
    "glm_moe_dsa": {
        "model_type": "glm_moe_dsa",
        **LATENT,
        **INDEXER,
        "num_hidden_layers": 4,
        "indexer_types": ["full", "full", "shared", "full"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "num_nextn_predict_layers": 0,
    },
    "gemma": {"model_type": "gemma", "head_dim": 16, **TWO},
    "starcoder2": {"model_type": "starcoder2", **TWO, **WINDOW},
    "phi": {"model_type": "phi", **TWO},
    "gptj": {"model_type": "gptj", "rotary_dim": 8, "n_inner": 80, **TWO},
    "opt": {"model_type": "opt", **TWO},
    "gpt_bigcode": {"model_type": "gpt_bigcode", **TWO},
    "gpt_bigcode-all-heads": {
        "model_type": "gpt_bigcode",
        "multi_query": False,
        "n_inner": 80,
        **TWO,
    },
    "gpt_neox": {"model_type": "gpt_neox", "rotary_pct": 0.5, **TWO},
    "gpt_neox-in-series": {
        "model_type": "gpt_neox",
        "use_parallel_residual": False,
        "rotary_pct": 0.5,
        "rotary_emb_base": 500.0,
        **TWO,
    },
    "falcon": {"model_type": "falcon", **TWO},
    "falcon-40b": {
        "model_type": "falcon",
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
        "bias": True,
        **TWO,
    },
    "falcon-in-series": {
        "model_type": "falcon",
        "multi_query": False,
        "parallel_attn": False,
        **TWO,
    },
    "olmo": {"model_type": "olmo", "clip_qkv": 1.5, **TWO},
    "stablelm": {"model_type": "stablelm", "partial_rotary_factor": 0.5, **TWO},
    "stablelm-12b": {
        "model_type": "stablelm",
        "partial_rotary_factor": 0.5,
        "qk_layernorm": True,
        "use_parallel_residual": True,
        **TWO,
    },
    "cohere2": {"model_type": "cohere2", "logit_scale": 0.3, **ALTERNATING},
    "exaone4": {"model_type": "exaone4", **ALTERNATING},
    "exaone4-full": {
        "model_type": "exaone4",
        "sliding_window": None,
        "layer_types": ["full_attention"] * 2,
        **TWO,
    },
    "glm": {"model_type": "glm", "head_dim": 16, **TWO},
    "seed_oss": {"model_type": "seed_oss", "head_dim": 16, **TWO},
    "ernie4_5": {"model_type": "ernie4_5", "head_dim": 16, **TWO},
    "arcee": {"model_type": "arcee", **TWO},
    "nemotron": {"model_type": "nemotron", **TWO},
    "internlm3": {
        "model_type": "internlm3",
        "head_dim": 16,
        "max_position_embeddings": 32,  # shorter than the texts
        "rope_parameters": {
            "rope_type": "dynamic",
            "rope_theta": 10000.0,
            "factor": 6.0,
        },
        **TWO,
    },
    "hunyuan": {
        "model_type": "hunyuan_v1_dense",
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "dynamic",
            "rope_theta": 10000.0,
            "factor": 1.0,
            "alpha": 100.0,
        },
        **TWO,
    },
    "hunyuan_moe": {
        "model_type": "hunyuan_v1_moe",
        "head_dim": 16,
        "num_experts": 4,
        "moe_topk": 2,
        **TWO,
    },
    "granitemoe": {
        "model_type": "granitemoe",
        "num_local_experts": 4,
        "embedding_multiplier": 6.0,
        "attention_multiplier": 0.3,
        "logits_scaling": 0.7,
        **TWO,
    },
    "granitemoeshared": {
        "model_type": "granitemoeshared",
        "num_local_experts": 4,
        "shared_intermediate_size": 24,
        **TWO,
    },
    "glm4_moe": {
        "model_type": "glm4_moe",
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "n_group": 2,
        "use_qk_norm": True,
        "routed_scaling_factor": 1.5,
        "num_nextn_predict_layers": 0,
        **TWO,
    },
    "ernie4_5_moe": {
        "model_type": "ernie4_5_moe",
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 24,
        **TWO,
    },
    "dots1": {
        "model_type": "dots1",
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        **ALTERNATING,
    },
    "glm4_moe_lite": {
        "model_type": "glm4_moe_lite",
        **{k: v for k, v in LATENT.items() if k != "first_k_dense_replace"},
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "num_nextn_predict_layers": 0,
        **TWO,
    },
    "ministral3": {
        "model_type": "ministral3",
        "head_dim": 16,
        "rope_parameters": {**YARN_ROPE, "llama_4_scaling_beta": 0.5},
        **TWO,
    },
    "bloom": {"model_type": "bloom", "num_attention_heads": 6, **TWO},
    "mpt": {"model_type": "mpt", **TWO},
    "llama4": {
        "model_type": "llama4_text",
        "head_dim": 16,
        "num_hidden_layers": 4,
        "intermediate_size_mlp": 56,
        "interleave_moe_layer_step": 2,
        "num_local_experts": 4,
        "attention_chunk_size": 16,
        "floor_scale": 8,
        "attn_scale": 0.5,
        "no_rope_layer_interval": 2,
    },
    "apertus": {"model_type": "apertus", "rope_parameters": LLAMA3_ROPE, **TWO},
    "phimoe": {
        "model_type": "phimoe",
        "num_local_experts": 4,
        "router_jitter_noise": 0.3,  # so that close logits are several
        "attention_bias": True,
        "lm_head_bias": True,
        "rope_parameters": {
            **{name: LONGROPE[name] for name in ("rope_type", "rope_theta")},
            "original_max_position_embeddings": 64,
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
            "long_factor": [1.5, 3.0, 4.0, 5.0, 6.0, 9.0],
            "short_mscale": 1.2,
            "long_mscale": 1.4,
        },
        **TWO,
    },
    "mamba2": {
        "model_type": "mamba2",
        "num_heads": 4,
        "head_dim": 24,
        "n_groups": 2,
        "state_size": 10,
        "chunk_size": 16,
        **TWO,
    },
    "mamba": {
        "model_type": "mamba",
        "state_size": 10,
        "time_step_rank": 5,
        **TWO,
    },
    "mamba-biased": {
        "model_type": "mamba",
        "expand": 1,
        "use_bias": True,
        "use_conv_bias": False,
        "conv_kernel": 3,
        "tie_word_embeddings": False,
        **TWO,
    },
    "jamba": {
        "model_type": "jamba",
        # A period of four that comes twice, with experts in every second layer.
        "num_hidden_layers": 8,
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "num_experts": 4,
        "mamba_d_state": 10,
        "mamba_dt_rank": 5,
    },
    "jamba-dense": {
        "model_type": "jamba",
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "num_experts": 1,
        "mamba_proj_bias": True,
        "mamba_conv_bias": False,
        "mamba_d_conv": 3,
        "mamba_expand": 1,
    },
    "falcon_h1": {
        "model_type": "falcon_h1",
        **MAMBA,
        **TWO,
        "mamba_d_ssm": 56,  # no multiple of the hidden size
        "mamba_n_groups": 2,
        "mamba_norm_before_gate": False,
        "attention_in_multiplier": 0.7,
        "attention_out_multiplier": 0.9,
        "embedding_multiplier": 3.0,
        "key_multiplier": 0.4,
        "lm_head_multiplier": 0.5,
        "mlp_multipliers": [0.8, 0.6],
        "ssm_in_multiplier": 1.25,
        "ssm_multipliers": [0.7, 0.5, 0.6, 0.8, 1.3],
        "ssm_out_multiplier": 0.4,
    },
    "falcon_h1-normed": {
        "model_type": "falcon_h1",
        **MAMBA,
        **TWO,
        "mamba_d_ssm": None,
        "mamba_rms_norm": True,
        "mamba_proj_bias": True,
        "projectors_bias": True,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "minimax_m2": {
        "model_type": "minimax_m2",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "rotary_dim": 8,
        **TWO,
    },
    "lfm2": {
        "model_type": "lfm2",
        # A period of three that comes twice, and a layer behind it.
        "num_hidden_layers": 7,
        "layer_types": ["conv", "conv", "full_attention"] * 2 + ["conv"],
        "block_auto_adjust_ff_dim": False,
    },
    "qwen3_next": {
        "model_type": "qwen3_next",
        **DELTA_NET,
        **EXPERTS,
        "shared_expert_intermediate_size": 40,
        "num_hidden_layers": 4,
        "rms_norm_eps": 1e-3,
    },
    "qwen3_5": {
        "model_type": "qwen3_5_text",
        **DELTA_NET,
        **TWO,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    },
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe_text",
        **DELTA_NET,
        **EXPERTS,
        **TWO,
        "shared_expert_intermediate_size": 40,
    },
    "granitemoehybrid": {
        "model_type": "granitemoehybrid",
        **MAMBA,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
        "num_local_experts": 4,
        "shared_intermediate_size": 40,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.5,
        "embedding_multiplier": 3.0,
    },
    "granitemoehybrid-dense": {
        "model_type": "granitemoehybrid",
        **MAMBA,
        **TWO,
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 40,
        "position_embedding_type": "rope",
        "mamba_n_groups": 2,
        "mamba_proj_bias": True,
        "mamba_conv_bias": False,
        "attention_multiplier": 0.3,
    },
    "nemotron_h": {
        "model_type": "nemotron_h",
        **NEMOTRON,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"] * 2,
        "n_routed_experts": 4,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 40,
        "moe_latent_size": 20,
        "routed_scaling_factor": 1.5,
    },
    "nemotron_h-dense": {
        "model_type": "nemotron_h",
        **NEMOTRON,
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
        "use_conv_bias": False,
        "use_bias": True,
        "mlp_bias": True,
    },
    "lfm2-biased": {
        "model_type": "lfm2",
        "num_hidden_layers": 3,
        "full_attn_idxs": [1],
        "conv_bias": True,
        "conv_L_cache": 4,
        "block_multiple_of": 16,
        "tie_word_embeddings": False,
    },
}

# One of each family, for what is slow.
FAMILIES = tuple(
    {fields["model_type"]: name for name, fields in reversed(VARIANTS.items())}.values()
)


def hf_fields(variant: str, **changes: Any) -> dict[str, Any]:
    """The fields of a variant's config file."""
    fields = {**SIZES, **VARIANTS[variant], **changes}
    names = OWN_NAMES.get(fields["model_type"], {})
    renamed = {names.get(name, name): v for name, v in fields.items()}
    return {name: v for name, v in renamed.items() if name is not None}
