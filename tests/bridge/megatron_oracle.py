"""Hugging Face tensors of any family in Megatron's shapes, regrouped by hand.

An oracle for the rules, which shares no code with them: numpy alone.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

Tensors = dict[str, np.ndarray]

_PLAIN = {
    "model.embed_tokens.weight": "embedding.word_embeddings.weight",
    "model.norm.weight": "decoder.final_layernorm.weight",
    "lm_head.weight": "output_layer.weight",
    "transformer.wte.weight": "embedding.word_embeddings.weight",
    "transformer.wpe.weight": "embedding.position_embeddings.weight",
    "transformer.ln_f.weight": "decoder.final_layernorm.weight",
    "transformer.ln_f.bias": "decoder.final_layernorm.bias",
}
_ATTENTION = {
    "self_attn.q_norm": "q_layernorm",
    "self_attn.k_norm": "k_layernorm",
    "self_attn.o_proj": "linear_proj",
    "self_attn.q_proj": "linear_q_proj",
    "self_attn.q_a_proj": "linear_q_down_proj",
    "self_attn.q_a_layernorm": "q_layernorm",
    "self_attn.q_b_proj": "linear_q_up_proj",
    "self_attn.kv_a_proj_with_mqa": "linear_kv_down_proj",
    "self_attn.kv_a_layernorm": "kv_layernorm",
    "self_attn.kv_b_proj": "linear_kv_up_proj",
}


def by_hand(hf: Mapping[str, np.ndarray], config: Any) -> Tensors:
    """Returns what Megatron's modules hold, by canonical name."""
    found = {_PLAIN[key]: value for key, value in hf.items() if key in _PLAIN}
    layers: dict[str, Tensors] = {}
    for key, value in hf.items():
        if match := re.match(r"(?:model\.layers|transformer\.h)\.(\d+)\.(.+)", key):
            layers.setdefault(match[1], {})[match[2]] = value
    for number, layer in layers.items():
        inner = _gpt2(layer) if config.model_type == "gpt2" else layer
        for key, value in _layer(inner, config).items():
            found[f"decoder.layers.{number}.{key}"] = value
    return found


def _gpt2(layer: Tensors) -> Tensors:
    """A layer of GPT-2 by Llama's names: kernels are stored the other way around."""
    names = {
        "ln_1": "input_layernorm",
        "ln_2": "post_attention_layernorm",
        "attn.c_proj": "self_attn.o_proj",
        "mlp.c_fc": "mlp.up_proj",
        "mlp.c_proj": "mlp.down_proj",
        "attn.c_attn": "self_attn.qkv_proj",
    }
    renamed = {}
    for key, value in layer.items():
        module, _, kind = key.rpartition(".")
        renamed[f"{names[module]}.{kind}"] = value.T
    return renamed


def _layer(layer: Tensors, config: Any) -> Tensors:
    layer = dict(layer)
    for kind in ("weight", "bias"):
        _fuse_qkv(layer, config, kind)
    latent = config.mla is not None
    sparse = any("expert" in key for key in layer)
    norm = "pre_mlp_layernorm." if sparse else "mlp.linear_fc1.layer_norm_"
    first = "input_layernorm." if latent else "self_attention.linear_qkv.layer_norm_"
    found = {}
    for key, value in layer.items():
        module, _, kind = key.rpartition(".")
        if module == "input_layernorm":
            found[first + kind] = value
        elif module == "post_attention_layernorm":
            found[norm + kind] = value
        elif module in _ATTENTION:
            found[f"self_attention.{_ATTENTION[module]}.{kind}"] = value
        elif key == "self_attn.sinks":
            found["self_attention.core_attention.softmax_offset"] = value
        elif key.startswith("self_attention."):
            found[key] = value
    inside = {
        key.partition(".")[2]: value
        for key, value in layer.items()
        if key.startswith(("mlp.", "block_sparse_moe."))
    }
    return found | {f"mlp.{key}": value for key, value in _mlp(inside).items()}


def _fuse_qkv(layer: Tensors, config: Any, kind: str) -> None:
    if f"self_attn.q_proj.{kind}" in layer and config.mla is None:
        q, k, v = (layer.pop(f"self_attn.{x}_proj.{kind}") for x in "qkv")
    elif f"self_attn.qkv_proj.{kind}" in layer:
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        ends = np.cumsum([heads, groups]) * config.head_dim
        q, k, v = np.split(layer.pop(f"self_attn.qkv_proj.{kind}"), ends)
    else:
        return
    parts = [np.split(x, config.num_key_value_heads) for x in (q, k, v)]
    grouped = [part for group in zip(*parts, strict=True) for part in group]
    layer[f"self_attention.linear_qkv.{kind}"] = np.concatenate(grouped)


def _mlp(mlp: Tensors) -> Tensors:
    found: Tensors = {}
    for prefix in sorted({_prefix(key) for key in mlp}):
        own = {k[len(prefix) :]: v for k, v in mlp.items() if _prefix(k) == prefix}
        shared = prefix.startswith("shared_expert")
        found |= {
            ("shared_experts." if shared else prefix) + key: value
            for key, value in _one_mlp(own).items()
        }
    return found | _router(mlp) | _fused_experts(mlp)


def _prefix(key: str) -> str:
    match = re.match(r"(experts\.\d+\.|shared_experts?\.)", key)
    return match[1] if match else ""


def _one_mlp(own: Tensors) -> Tensors:
    found = {}
    for kind in ("weight", "bias"):
        gates = [own.get(f"{name}.{kind}") for name in ("gate_proj", "w1")]
        ups = [own.get(f"{name}.{kind}") for name in ("up_proj", "w3")]
        downs = [own.get(f"{name}.{kind}") for name in ("down_proj", "w2")]
        halves = [x for x in (*gates, *ups) if x is not None]
        if f"gate_up_proj.{kind}" in own:
            halves = [own[f"gate_up_proj.{kind}"]]
        if halves:
            found[f"linear_fc1.{kind}"] = np.concatenate(halves)
        found |= {f"linear_fc2.{kind}": x for x in downs if x is not None}
    return found


def _router(mlp: Tensors) -> Tensors:
    names = {
        "gate.weight": "router.weight",
        "router.weight": "router.weight",
        "router.bias": "router.bias",
        "gate.e_score_correction_bias": "router.expert_bias",
        "shared_expert_gate.weight": "shared_experts.gate_weight",
    }
    return {names[key]: value for key, value in mlp.items() if key in names}


def _fused_experts(mlp: Tensors) -> Tensors:
    """GPT-OSS: all experts in one, [in, out], gate and up column by column."""
    if "experts.gate_up_proj" not in mlp:
        return {}
    found = {}
    for e in range(len(mlp["experts.down_proj"])):
        columns = {
            "weight": mlp["experts.gate_up_proj"][e].T,
            "bias": mlp["experts.gate_up_proj_bias"][e],
        }
        for kind, rows in columns.items():
            fused = np.concatenate([rows[0::2], rows[1::2]])
            found[f"experts.{e}.linear_fc1.{kind}"] = fused
        found[f"experts.{e}.linear_fc2.weight"] = mlp["experts.down_proj"][e].T
        found[f"experts.{e}.linear_fc2.bias"] = mlp["experts.down_proj_bias"][e]
    return found
