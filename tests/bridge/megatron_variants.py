"""Tiny models that have a twin in Megatron, as data without torch."""

import dataclasses

from tiny_configs import LLAMA3_ROPE, VARIANTS, hf_fields

import bridge
from bridge.models import DecoderConfig

# What transformers norms latent vectors with; and Megatron's way to judge a group.
LATENT = {"rms_norm_eps": 1e-6}
CHANGES: dict[str, dict] = {
    "llama-llama3-rope": {
        "rope_parameters": {**LLAMA3_ROPE, "original_max_position_embeddings": 8192}
    },
    "granite": {
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
    },
    "deepseek_v2": LATENT,
    "deepseek_v2-lite": LATENT,
    "deepseek_v2-groups": LATENT,
    "deepseek_v3": {**LATENT, "num_experts_per_tok": 4},
}
WITHOUT = {
    "gemma2": "scale_embeddings",
    "gemma3": "norm_placement",
    "phi3-longrope-short": "longrope",
    "phi3-longrope-long": "longrope",
    "olmo2": "norm_placement",
    "olmo3": "qk_norm",
    "cohere": "logit_scale",
    "cohere-qk-norm": "qk_norm",
    "glm4": "norm_placement",
    "olmoe": "clip_qkv",
}
"""Those that have none, and one of the reasons."""

WITH = tuple(name for name in VARIANTS if name not in WITHOUT)


def twin_fields(variant: str) -> dict:
    """A config file of a variant, changed to what Megatron can be."""
    return hf_fields(variant, **CHANGES.get(variant, {}))


def twin_config(variant: str, **changes) -> DecoderConfig:
    """The same, read."""
    config = bridge.from_hf_config(twin_fields(variant))
    return dataclasses.replace(config, **changes)
