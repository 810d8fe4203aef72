"""Transforms of `TransformerConfig` fields for sizes, norms and biases.

Each `FieldTransform` reads some fields into our values and writes them back. A value
that the other side cannot express raises a `ValueError` with one line per reason.

Source: Megatron-LM megatron/core/transformer/transformer_config.py::TransformerConfig,
megatron/core/models/gpt/gpt_model.py::GPTModel
"""

import dataclasses
from typing import Any

from bridge.families._field_transform import FieldTransform
from bridge.megatron.config._moe import read_dense_layers
from bridge.megatron.config._refusal import Fields, refuse
from bridge.models import DecoderConfig

_SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "init_method_std": "initializer_range",
    "max_sequence_length": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "share_embeddings_and_output_weights": "tie_word_embeddings",
}
_PLAIN: dict[str, tuple[Any, str]] = {
    "norm_placement": ("pre", "its layers norm before attention and MLP, and add"),
    "recurrent_norm_placement": (None, "its layers norm alike"),
    "scale_embeddings": (False, "it has no multiplier of embeddings"),
    "embedding_multiplier": (1, "it has no multiplier of embeddings"),
    "residual_in_fp32": (False, "its stream has the dtype of its weights"),
    "multipliers": (None, "it has no multipliers inside of layers"),
    "attention_chunk_size": (None, "its layers do not attend in chunks"),
    "unscored_tokens": (0, "its embedding has the rows of its logits"),
    "embedding_norm": (False, "it does not norm embeddings"),
    "query_scale": (None, "its queries do not grow with their position"),
    "alibi_bias_max": (None, "it has no ALiBi"),
    "residual_multiplier": (1, "it has no multiplier of the residual stream"),
    "logit_scale": (1, "it has no multiplier of logits"),
    "logits_scaling": (1, "it has no multiplier of logits"),
    "attn_logit_softcapping": (None, "it has no softcap"),
    "final_logit_softcapping": (None, "it has no softcap"),
    "clip_qkv": (None, "it does not clip"),
    "inner_norms": (False, "its projections back read what is not normed"),
    "differential_attention": (False, "its heads subtract nothing"),
    "dynamic_mask_size": (None, "its keys have no bias"),
    "attention_experts": (None, "its attention has no experts"),
    "final_norm_eps": (None, "all its norms have one epsilon"),
    "learned_residual": (False, "it has no multiplier of the residual stream"),
    "full_attention": (None, "all its layers have heads of one width"),
    "kv_sharing": (None, "each of its layers has keys and values of its own"),
    "per_layer_input": (None, "its layers have no inputs of their own"),
    "altup": (None, "it has one residual stream"),
    "hyper_connections": (None, "it has one residual stream"),
    "compressed_attention": (None, "its attention reads no entries of several tokens"),
    "dense_branch": (False, "its experts have no dense branch beside them"),
    "hash_layers": ((), "its routers choose the experts of all tokens"),
    "laurel_rank": (None, "its residual is not learned"),
    "gate_sparsity": (None, "its MLPs keep all values of the gate"),
    "value_head_dim": (None, "its value heads are as wide as its key heads"),
    "value_norm": (False, "it does not norm values"),
    "layer_scale": (False, "its layers have no scale"),
    "indexer": (None, "its sparse attention is not modelled"),
    "block_indexer": (None, "its attention to blocks of keys is not modelled"),
    "swiglu_limit": (None, "its dense MLPs clamp nothing"),
    "attention_gate": (False, "its heads have no gate"),
    "short_conv": (None, "its short convolutions are not modelled"),
    "delta_net": (None, "its delta nets are not modelled"),
    "lightning": (None, "its lightning attention is not modelled"),
    "residual_factors": (None, "it has no multiplier of the residual stream"),
    "mamba": (None, "its Mamba layers are not modelled"),
    "mamba1": (None, "it has no Mamba 1 layers"),
    "rg_lru": (None, "it has no recurrent units"),
    "shared_blocks": (None, "each of its layers has weights of its own"),
    "norm_gate_rank": (None, "its norms have no gates"),
    "norm_scale": (True, "its norms have a scale"),
    "qk_norm_after_rope": (False, "it norms heads before the rope"),
    "qk_norm_bias": (False, "its norms of heads have no bias of their own"),
    "head_bias": (False, "its output layer has no bias"),
    "head_transform": (None, "its output layer reads the normed stream"),
    "unnormed_mixer_layers": ((), "all its attention reads what is normed"),
    "mlp_sizes": ((), "all its MLPs have one width"),
    "sinusoidal_positions": (False, "its positions are learned or rotary"),
    "position_offset": (0, "its positions begin at row 0"),
    "sliding_rope": (None, "all its layers have one rope"),
}
"""Values without a Megatron field: the only supported value, and the reason."""


def _write_plain(config: DecoderConfig) -> dict[str, Any]:
    kinds = config.layer_kinds
    if any(kind.mixer is None or kind.channels is None for kind in kinds):
        raise ValueError("layer_types: its layers have both attention and an MLP")
    refuse(
        [
            f"{name} {_shown(getattr(config, name))}: {why}"
            for name, (value, why) in _PLAIN.items()
            if getattr(config, name) != value
        ]
    )
    return {}


def _shown(value: Any) -> str:
    return "is set" if dataclasses.is_dataclass(value) else f"= {value!r}"


def _read_sizes(fields: Fields) -> dict[str, Any]:
    wrong = [f"{name} is missing" for name in _SIZES if fields.get(name) is None]
    refuse([line for line in wrong if "ffn" not in line])
    values = {ours: fields.get(theirs) for theirs, ours in _SIZES.items()}
    if values["intermediate_size"] is None:
        values["intermediate_size"] = 4 * fields["hidden_size"]
    return values


def _write_sizes(config: DecoderConfig) -> dict[str, Any]:
    return {theirs: getattr(config, ours) for theirs, ours in _SIZES.items()}


def _read_norm(fields: Fields) -> dict[str, Any]:
    kind, centered = fields["normalization"], fields["layernorm_zero_centered_gamma"]
    if kind not in ("RMSNorm", "LayerNorm"):
        raise ValueError(f"normalization = {kind!r}: only RMSNorm and LayerNorm are")
    if kind == "LayerNorm" and centered:
        raise ValueError(
            "layernorm_zero_centered_gamma = True: only RMSNorm's scale is modelled so"
        )
    norm = "layer" if kind == "LayerNorm" else "rms"
    return {
        "norm": "rms_zero_centered" if centered else norm,
        "norm_eps": fields["layernorm_epsilon"],
        "norm_bias": kind == "LayerNorm",
    }


def _write_norm(config: DecoderConfig) -> dict[str, Any]:
    layer = config.norm in ("layer", "layer_zero_centered")
    if config.norm == "layer_zero_centered":
        raise ValueError(
            "norm = 'layer_zero_centered': only RMSNorm's scale is modelled so"
        )
    if config.norm_bias != layer:
        raise ValueError(
            f"norm_bias = {config.norm_bias} of norm = {config.norm!r}: its LayerNorm "
            "has a bias, its RMSNorm has none"
        )
    return {
        "normalization": "LayerNorm" if config.norm == "layer" else "RMSNorm",
        "layernorm_zero_centered_gamma": config.norm == "rms_zero_centered",
        "layernorm_epsilon": config.norm_eps,
    }


def _read_biases(fields: Fields) -> dict[str, Any]:
    everywhere = fields["add_bias_linear"]
    values = {
        "attention_bias": everywhere or fields["add_qkv_bias"],
        "attention_out_bias": everywhere,
    }
    if fields["num_moe_experts"] is None:
        return values | {"mlp_bias": everywhere}
    if everywhere and fields["moe_shared_expert_intermediate_size"]:
        raise ValueError("add_bias_linear = True: its shared experts have none")
    return values | {
        "mlp_bias": everywhere and bool(read_dense_layers(fields)),
        "moe.expert_bias": everywhere,
        "moe.router_bias": everywhere,
    }


def _write_biases(config: DecoderConfig) -> dict[str, Any]:
    others, moe = {"attention_out_bias": config.attention_out_bias}, config.moe
    if moe is None or config.dense_layers or config.mlp_bias:
        others["mlp_bias"] = config.mlp_bias
    if moe is not None:
        others["moe.expert_bias"] = moe.expert_bias
        others["moe.router_bias"] = moe.router_bias
    everywhere = all(others.values()) and config.attention_bias
    if any(others.values()) and not everywhere:
        raise ValueError(
            f"attention_bias = {config.attention_bias}, "
            + ", ".join(f"{name} = {value}" for name, value in others.items())
            + ": all its linear layers have biases, or those of q, k and v alone"
        )
    if everywhere and moe and moe.shared_intermediate_size:
        raise ValueError("moe.expert_bias = True: its shared experts have none")
    if config.mla and config.attention_bias:
        raise ValueError("attention_bias = True: its latent attention has none")
    return {
        "add_bias_linear": everywhere,
        "add_qkv_bias": config.attention_bias and not everywhere,
    }


LAYER_CODECS = (
    FieldTransform((), lambda fields: {}, _write_plain),
    FieldTransform(tuple(_SIZES), _read_sizes, _write_sizes),
    FieldTransform(
        ("normalization", "layernorm_zero_centered_gamma", "layernorm_epsilon"),
        _read_norm,
        _write_norm,
    ),
    FieldTransform(("add_bias_linear", "add_qkv_bias"), _read_biases, _write_biases),
)
