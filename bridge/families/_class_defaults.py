"""Sizes that transformers' config classes have where a file says none, by `model_type`.

transformers 4 leaves a field out of a `text_config` that has the default of its class.
A config of its own always says them: there a missing one is refused.

A family belongs here if published multimodal models have it as their text part; of any
other, a `text_config` without a size is refused. Each entry has all the fields that the
family's table requires, with the defaults of the class: tests compare both.

Source: transformers `models/*/configuration_*.py`.
"""

from collections.abc import Mapping
from typing import Any

_NAMES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)


def _sizes(*values: int | None) -> dict[str, int]:
    named = zip(_NAMES, values, strict=True)
    return {name: value for name, value in named if value is not None}


CLASS_DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "llama": _sizes(32000, 4096, 11008, 32, 32),
    "mistral": _sizes(32000, 4096, 14336, 32, 32),
    "qwen2": _sizes(151936, 4096, 22016, 32, 32),
    "qwen3": _sizes(151936, 4096, 22016, 32, 32),
    "gemma2": _sizes(256000, 2304, 9216, 26, 8),
    "gemma3_text": _sizes(262208, 2304, 9216, 26, 8),
    "gemma3n_text": _sizes(262400, 2048, None, 35, 8),
    "gemma4_text": _sizes(262144, 2304, 9216, 30, 8),
    "phi3": _sizes(32064, 3072, 8192, 32, 32),
    "llama4_text": _sizes(202048, 5120, None, 48, 40),
    "gpt2": {},
    "olmo2": _sizes(50304, 4096, 11008, 32, 32),
    "olmo3": _sizes(50304, 4096, 11008, 32, 32),
    "smollm3": _sizes(128256, 2048, 11008, 36, 16),
    "granite": _sizes(32000, 4096, 11008, 32, 32),
    "cohere": _sizes(256000, 8192, 22528, 40, 64),
    "cohere2": _sizes(256000, 8192, 22528, 40, 64),
    "cohere_compass_text": _sizes(256000, 8192, 22528, 40, 64),
    "mistral4": _sizes(131072, 4096, 12288, 36, 32),
    "mllama_text_model": _sizes(128256, 4096, 14336, None, 32),
    "exaone4": _sizes(102400, 4096, 16384, 32, 32),
    "hyperclovax": _sizes(32000, 4096, 11008, 32, 32),
    "lfm2": _sizes(65536, 2560, None, 32, 32),
    "lfm3": _sizes(128000, 2048, 7680, 24, 16),
    "nemotron_h": _sizes(131072, 4096, 21504, None, 32),
    "glm4": _sizes(151552, 4096, 13696, 40, 32),
    "qwen2_moe": _sizes(151936, 2048, 5632, 24, 16),
    "olmoe": _sizes(50304, 2048, None, 16, 16),
    "qwen3_moe": _sizes(151936, 2048, 6144, 24, 32),
    "aria_text": _sizes(32000, 4096, None, 32, 32),
    "mixtral": _sizes(32000, 4096, None, 32, 32),
    "gpt_oss": _sizes(201088, 2880, None, 36, 64),
    "deepseek_v2": _sizes(102400, 4096, 11008, 32, 32),
    "qwen3_5_text": _sizes(248320, 4096, 12288, 32, 16),
    "qwen3_5_moe_text": _sizes(248320, 2048, None, 40, 16),
    "deepseek_v3": _sizes(129280, 7168, 18432, 61, 128),
}
"""Sizes by field name, by `model_type`; fields that a family requires."""

_QWEN2_VL = {
    **_sizes(152064, 8192, 29568, 80, 64),
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_window_layers": 80,
    "rope_theta": 1000000.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}

TEXT_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gemma4_unified_text": {
        **_sizes(262144, 2304, 9216, 30, 8),
        "hidden_size_per_layer_input": 0,
        "max_position_embeddings": 262144,
        "sliding_window": 1024,
    },
    "granite_docling_text": {
        **_sizes(133800, 1024, 2048, 28, 16),
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "pad_token_id": 100256,
        "bos_token_id": 100257,
        "eos_token_id": 100257,
        "tie_word_embeddings": True,
        "embedding_multiplier": 12.0,
        "logits_scaling": 4.0,
        "residual_multiplier": 0.263,
        "attention_multiplier": 0.015625,
    },
    "glm4v_text": {
        **_sizes(151552, 4096, 13696, 40, 32),
        "head_dim": None,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 1.0,
        "eos_token_id": None,
        "pad_token_id": None,
    },
    "glm_ocr_text": {
        **_sizes(59392, 1024, 4096, 16, 16),
        "num_key_value_heads": 8,
        "head_dim": None,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "partial_rotary_factor": 1.0,
        "eos_token_id": None,
        "pad_token_id": None,
    },
    "granite4_vision_text": {
        **_sizes(32000, 4096, 11008, 32, 32),
        "num_key_value_heads": 32,
    },
    "hunyuan_vl_text": {
        **_sizes(290943, 4096, 11008, 32, 32),
        "num_key_value_heads": 32,
        "head_dim": None,
        "tie_word_embeddings": True,
    },
    "paddleocr_vl_text": {
        **_sizes(103424, 1024, 3072, 18, 16),
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
    },
    "glm4v_moe_text": {
        **_sizes(151424, 4096, 10944, 46, 96),
        "max_position_embeddings": 65536,
        "attention_bias": True,
    },
    "qwen2_5_omni_text": {
        **_sizes(152064, 3584, 18944, 28, 28),
        "num_key_value_heads": 4,
        "rope_theta": 1000000.0,
    },
    "qwen3_omni_moe_text": {
        **_sizes(3584, 2048, 18944, 28, 28),
        "rope_theta": 1000000.0,
        "norm_topk_prob": True,
    },
    "qwen2_vl_text": _QWEN2_VL,
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen3_vl_text": {
        **_sizes(151936, 4096, 22016, 32, 32),
        "max_position_embeddings": 128000,
        "rope_theta": 500000.0,
    },
    "qwen3_vl_moe_text": {
        **_sizes(151936, 2048, 5632, 24, 16),
        "num_key_value_heads": 16,
        "max_position_embeddings": 128000,
        "rope_theta": 500000.0,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 4,
        "num_experts": 60,
        "tie_word_embeddings": True,
        "norm_topk_prob": True,
    },
}
"""Defaults of text parts that are a family's model with other defaults than its own."""
