"""The goldens' Hugging Face twins in Megatron's shapes, regrouped by hand."""

import json
from pathlib import Path

import numpy as np

import bridge


def megatron_twin(hf: Path) -> dict[str, np.ndarray]:
    """Hugging Face weights by canonical name: an oracle that shares no code with it."""
    source, config = (
        bridge.open_checkpoint(hf),
        json.loads((hf / "config.json").read_text()),
    )
    w = {key: source.read(key) for key in source.keys()}
    twin = {
        "embedding.word_embeddings.weight": w["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": w["model.norm.weight"],
    }
    if not config["tie_word_embeddings"]:
        twin["output_layer.weight"] = w["lm_head.weight"]
    for i in range(config["num_hidden_layers"]):
        theirs, ours = f"model.layers.{i}", f"decoder.layers.{i}"
        layer = {k.removeprefix(f"{theirs}."): v for k, v in w.items() if theirs in k}
        mlp = experts if "num_local_experts" in config else dense
        for key, value in (attention(layer, config) | mlp(layer, config)).items():
            twin[f"{ours}.{key}"] = value
    return twin


def attention(layer: dict[str, np.ndarray], config: dict) -> dict[str, np.ndarray]:
    groups, width = config["num_key_value_heads"], config["hidden_size"]
    q, k, v = (layer[f"self_attn.{x}_proj.weight"] for x in "qkv")
    # A group of queries, then the one key and the one value that they share.
    rows = [np.split(x.reshape(-1, width), groups) for x in (q, k, v)]
    found = {
        "self_attention.linear_qkv.layer_norm_weight": layer["input_layernorm.weight"],
        "self_attention.linear_qkv.weight": np.concatenate(
            [part for group in zip(*rows, strict=True) for part in group]
        ),
        "self_attention.linear_proj.weight": layer["self_attn.o_proj.weight"],
    }
    if "self_attn.q_norm.weight" in layer:
        found["self_attention.q_layernorm.weight"] = layer["self_attn.q_norm.weight"]
        found["self_attention.k_layernorm.weight"] = layer["self_attn.k_norm.weight"]
    return found


def dense(layer: dict[str, np.ndarray], config: dict) -> dict[str, np.ndarray]:
    gate_up = [layer["mlp.gate_proj.weight"], layer["mlp.up_proj.weight"]]
    return {
        "mlp.linear_fc1.layer_norm_weight": layer["post_attention_layernorm.weight"],
        "mlp.linear_fc1.weight": np.concatenate(gate_up),
        "mlp.linear_fc2.weight": layer["mlp.down_proj.weight"],
    }


def experts(layer: dict[str, np.ndarray], config: dict) -> dict[str, np.ndarray]:
    moe = "block_sparse_moe"
    found = {
        "pre_mlp_layernorm.weight": layer["post_attention_layernorm.weight"],
        "mlp.router.weight": layer[f"{moe}.gate.weight"],
    }
    for e in range(config["num_local_experts"]):
        gate, down, up = (layer[f"{moe}.experts.{e}.w{n}.weight"] for n in (1, 2, 3))
        found[f"mlp.experts.{e}.linear_fc1.weight"] = np.concatenate([gate, up])
        found[f"mlp.experts.{e}.linear_fc2.weight"] = down
    return found
