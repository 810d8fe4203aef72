"""Tiny models that have a twin in Megatron, as data without torch."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from bridge_helpers import like_of
from tiny_configs import LLAMA3_ROPE, VARIANTS, hf_fields

import bridge
from bridge._tree import named_leaves
from bridge.formats._source import Source
from bridge.megatron import TWINS
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
    "gemma": "scale_embeddings",
    "phi": "head_bias",
    "opt": "position_offset",
    "olmo": "norm_scale",
    "gpt_neox": "norm_placement",
    "cohere2": "logit_scale",
    "arcee": "relu2",
    "nemotron": "layer_zero_centered",
    "internlm3": "dynamic",
    "hunyuan": "qk_norm_after_rope",
    "minimax_m2": "qk_norm",
    "minimax_m3": "block_indexer",
}
"""Those that have none, and one of the reasons."""

WITH = tuple(
    name
    for name, fields in VARIANTS.items()
    if name not in WITHOUT and fields["model_type"] in TWINS
)

GOLDENS = {
    "qwen3, TP2 PP2": ("qwen3", "torch_dist", "qwen3"),
    "qwen3, legacy": ("qwen3", "legacy", "qwen3"),
    "qwen3, without common.pt": ("qwen3_mcore_head", "torch_dist", "qwen3"),
    "mixtral, PP2 EP2": ("mixtral", "torch_dist", "mixtral"),
    "mixtral, legacy": ("mixtral", "legacy", "mixtral"),
}
"""Of each checkpoint that Megatron wrote: directory, format, and its twin's."""


def twin_fields(variant: str) -> dict:
    """A config file of a variant, changed to what Megatron can be."""
    return hf_fields(variant, **CHANGES.get(variant, {}))


def twin_config(variant: str, **changes) -> DecoderConfig:
    """The same, read."""
    config = bridge.from_hf_config(twin_fields(variant))
    return dataclasses.replace(config, **changes)


def exact_params(config: DecoderConfig) -> Any:
    """Weights that are the same bits on every machine: integers, shifted and scaled.

    Norms are around 1 and kernels keep the variance, so that every weight matters.
    """
    leaves = like_of(config)
    names = list(named_leaves(leaves))
    flat, tree = jax.tree.flatten(leaves)
    values = [
        _exact(number, name, leaf.shape)
        for number, (name, leaf) in enumerate(zip(names, flat, strict=True))
    ]
    return jax.tree.unflatten(tree, values)


def _exact(number: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    x = np.arange(math.prod(shape), dtype=np.uint32) + np.uint32(number * 1_000_003)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    unit = (x ^ (x >> np.uint32(16))).astype(np.int64) - 2**31
    value = (unit / 2**31).astype(np.float32).reshape(shape)
    if name.endswith("norm.scale"):
        return 1 + value / 2
    return value / 4 if "proj" in name and "bias" not in name else value / 2


def exact_tokens(config: DecoderConfig) -> np.ndarray:
    """Two texts of 40 tokens."""
    return (np.arange(80).reshape(2, 40) * 37 + 11) % config.vocab_size


def digest(fields: Mapping[str, Any], source: Source) -> str:
    """A checksum of all that Megatron is given: fields, names, shapes and bits."""
    sha = hashlib.sha256(json.dumps(fields, sort_keys=True).encode())
    for key in sorted(source.keys()):
        tensor = source.read(key)
        sha.update(f"{key} {tensor.dtype} {tensor.shape}".encode())
        sha.update(np.ascontiguousarray(tensor).tobytes())
    return sha.hexdigest()
