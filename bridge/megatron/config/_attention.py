"""Transforms of `TransformerConfig` fields for heads, softmax and sliding windows.

Source: Megatron-LM megatron/core/transformer/transformer_config.py::TransformerConfig,
megatron/core/transformer/utils.py::get_sliding_window_causal_mask
"""

from typing import Any

from bridge.families._field_transform import FieldTransform
from bridge.megatron.config._refusal import Fields, refuse
from bridge.models import DecoderConfig


def _read_attention(fields: Fields) -> dict[str, Any]:
    kinds = {"vanilla": False, "learnable": True}
    if fields["softmax_type"] not in kinds:
        raise ValueError(
            f"softmax_type = {fields['softmax_type']!r}: only {', '.join(kinds)} are"
        )
    values = {
        "attention_sinks": kinds[fields["softmax_type"]],
        "attention_multiplier": fields["softmax_scale"],
    }
    if fields["multi_latent_attention"]:
        return values
    return values | {
        "num_key_value_heads": fields["num_query_groups"],
        "head_dim": fields["kv_channels"],
        "qk_norm": "head" if fields["qk_layernorm"] else None,
    }


def _write_attention(config: DecoderConfig) -> dict[str, Any]:
    wrong = []
    if config.qk_norm not in (None, "head") or (config.mla and config.qk_norm):
        wrong.append(f"qk_norm = {config.qk_norm!r}: its heads share one scale")
    if config.query_pre_attn_scalar not in (None, config.head_dim):
        wrong.append(
            f"query_pre_attn_scalar = {config.query_pre_attn_scalar}: its "
            "softmax_scale is an attention_multiplier"
        )
    refuse(wrong)
    written = {
        "softmax_type": "learnable" if config.attention_sinks else "vanilla",
        "softmax_scale": config.attention_multiplier,
    }
    if config.mla is not None:
        return written
    return written | {
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": config.head_dim,
        "qk_layernorm": config.qk_norm is not None,
    }


def _read_window(fields: Fields) -> dict[str, Any]:
    window, pattern = fields["window_size"], fields["window_attn_skip_freq"]
    if window is None or tuple(window)[0] == -1:
        return {"sliding_window": None, "layer_types": None}
    left, right = window
    if right != 0:
        raise ValueError(f"window_size = {window!r}: a decoder sees nothing ahead")
    # `window_size` counts the tokens before the query; `sliding_window` includes it.
    values: dict[str, Any] = {"sliding_window": left + 1, "layer_types": None}
    if pattern is not None:
        count = fields["num_layers"]
        if isinstance(pattern, int):
            pattern = [int((i + 1) % pattern != 0) for i in range(count)]
        kinds = ("full_attention", "sliding_attention")
        values["layer_types"] = tuple(kinds[slides] for slides in pattern)
    return values


def _write_window(config: DecoderConfig) -> dict[str, Any]:
    slides = [window is not None for window in config.windows]
    if config.sliding_window is None or not any(slides):
        return {"window_size": None, "window_attn_skip_freq": None}
    return {
        "window_size": (config.sliding_window - 1, 0),
        "window_attn_skip_freq": None if all(slides) else [int(s) for s in slides],
    }


ATTENTION_CODEC = FieldTransform(
    (
        *("softmax_type", "softmax_scale", "num_query_groups", "kv_channels"),
        "qk_layernorm",
    ),
    _read_attention,
    _write_attention,
)
WINDOW_CODEC = FieldTransform(
    ("window_size", "window_attn_skip_freq"), _read_window, _write_window
)
