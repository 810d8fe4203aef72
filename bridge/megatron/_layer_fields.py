"""Fields of a `TransformerConfig`: sizes, norms, biases, attention, MLP.

Each `Codec` reads some fields into values of ours, and writes them back; what cannot be
said on the other side raises a `ValueError` with a line for each reason.

Source: Megatron-LM megatron/core/transformer/transformer_config.py::TransformerConfig,
megatron/core/models/gpt/gpt_model.py::GPTModel
"""

from collections.abc import Mapping
from typing import Any

from bridge._codec import Codec
from bridge.models import DecoderConfig, RopeConfig

Fields = Mapping[str, Any]

SILU, GELU, TANH_GELU, QUICK_GELU = "silu", "gelu", "fast_gelu", "quick_gelu"
QUICK_ALPHA = 1.702
"""What the sigmoid of `quick_gelu` multiplies its argument by."""

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
    "scale_embeddings": (False, "it has no multiplier of embeddings"),
    "embedding_multiplier": (1, "it has no multiplier of embeddings"),
    "residual_multiplier": (1, "it has no multiplier of the residual stream"),
    "logit_scale": (1, "it has no multiplier of logits"),
    "logits_scaling": (1, "it has no multiplier of logits"),
    "attn_logit_softcapping": (None, "it has no softcap"),
    "final_logit_softcapping": (None, "it has no softcap"),
    "clip_qkv": (None, "it does not clip"),
    "sliding_rope": (None, "all its layers have one rope"),
}
"""What Megatron's layers always are, and why nothing else can be said."""


def refuse(wrong: list[str]) -> None:
    """Raises a `ValueError` of these lines, if there are any."""
    if wrong:
        raise ValueError("\n".join(wrong))


def _write_plain(config: DecoderConfig) -> dict[str, Any]:
    refuse(
        [
            f"{name} {_shown(getattr(config, name))}: {why}"
            for name, (value, why) in _PLAIN.items()
            if getattr(config, name) != value
        ]
    )
    return {}


def _shown(value: Any) -> str:
    return "is set" if isinstance(value, RopeConfig) else f"= {value!r}"


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
    if config.norm_bias != (config.norm == "layer"):
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
    sparse = fields["num_moe_experts"] is not None
    if sparse:
        values |= {"moe.expert_bias": everywhere, "moe.router_bias": everywhere}
    # No layer of a sparse model that is biased is dense: see `_write_biases`.
    return values | {"mlp_bias": everywhere and not sparse}


def _write_biases(config: DecoderConfig) -> dict[str, Any]:
    others = {"attention_out_bias": config.attention_out_bias}
    if config.moe is None or config.mlp_bias:
        others["mlp_bias"] = config.mlp_bias
    if config.moe is not None:
        others["moe.expert_bias"] = config.moe.expert_bias
        others["moe.router_bias"] = config.moe.router_bias
    everywhere = all(others.values()) and config.attention_bias
    if any(others.values()) and not everywhere:
        raise ValueError(
            f"attention_bias = {config.attention_bias}, "
            + ", ".join(f"{name} = {value}" for name, value in others.items())
            + ": all its linear layers have biases, or those of q, k and v alone"
        )
    if everywhere and config.moe and (config.dense_layers or _has_shared(config)):
        raise ValueError("biases beside dense layers or shared experts: it has none")
    if config.mla and config.attention_bias:
        raise ValueError("attention_bias = True: its latent attention has none")
    return {
        "add_bias_linear": everywhere,
        "add_qkv_bias": config.attention_bias and not everywhere,
    }


def _has_shared(config: DecoderConfig) -> bool:
    return config.moe is not None and config.moe.shared_intermediate_size is not None


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


def _read_mlp(fields: Fields) -> dict[str, Any]:
    name = activation_name(fields["activation_func"])
    clamp, offset = fields["activation_func_clamp_value"], fields["glu_linear_offset"]
    gated = fields["gated_linear_unit"]
    if name == QUICK_GELU:
        if not (gated and clamp and offset == 1 and fields["num_moe_experts"]):
            raise ValueError(
                "activation_func = quick_gelu: only in gated experts, with a clamp "
                "and a glu_linear_offset of 1"
            )
        swiglu = {"moe.swiglu_limit": clamp, "moe.swiglu_alpha": QUICK_ALPHA}
        return {"hidden_act": "silu", "gated_mlp": True, **swiglu}
    # Megatron's fused kernel of GELU is of its approximation by tanh.
    tanh = name == TANH_GELU or (name == GELU and fields["bias_activation_fusion"])
    ours = {SILU: "silu", GELU: "gelu", TANH_GELU: "gelu_new"}
    wrong = [] if name in ours else [f"activation_func = {name!r}: none of {[*ours]}"]
    wrong += [
        f"{key} = {fields[key]!r}: only with quick_gelu"
        for key in ("activation_func_clamp_value", "glu_linear_offset")
        if fields[key]
    ]
    refuse(wrong)
    return {"hidden_act": "gelu_new" if tanh else ours[name], "gated_mlp": gated}


def activation_name(activation: Any) -> str:
    """Returns the name of an activation, however a config says it.

    Args:
      activation: A name, a function, or what a YAML file has for one: `_target_`, with
        the path of a function.
    """
    if isinstance(activation, Mapping):
        activation = activation.get("_target_")
    name = getattr(activation, "__name__", activation)
    return str(name).rpartition(".")[2]


def _write_mlp(config: DecoderConfig) -> dict[str, Any]:
    written = {
        "gated_linear_unit": config.gated_mlp,
        "activation_func_clamp_value": None,
        "glu_linear_offset": 0.0,
        "bias_activation_fusion": False,
    }
    if config.moe is not None and config.moe.swiglu_limit is not None:
        alone = not config.dense_layers and not _has_shared(config)
        if config.moe.swiglu_alpha != QUICK_ALPHA or not alone:
            raise ValueError(
                f"moe.swiglu_alpha = {config.moe.swiglu_alpha}: it has "
                f"{QUICK_ALPHA} in all MLPs of a model, or in none"
            )
        return written | {
            "activation_func": QUICK_GELU,
            "activation_func_clamp_value": config.moe.swiglu_limit,
            "glu_linear_offset": 1.0,
        }
    names = {"silu": SILU, "gelu": GELU}
    return written | {"activation_func": names.get(config.hidden_act, TANH_GELU)}


def _read_window(fields: Fields) -> dict[str, Any]:
    window, pattern = fields["window_size"], fields["window_attn_skip_freq"]
    if window is None or tuple(window)[0] == -1:
        return {"sliding_window": None, "layer_types": None}
    left, right = window
    if right != 0:
        raise ValueError(f"window_size = {window!r}: a decoder sees nothing ahead")
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


LAYER_CODECS = (
    Codec((), lambda fields: {}, _write_plain),
    Codec(tuple(_SIZES), _read_sizes, _write_sizes),
    Codec(
        ("normalization", "layernorm_zero_centered_gamma", "layernorm_epsilon"),
        _read_norm,
        _write_norm,
    ),
    Codec(("add_bias_linear", "add_qkv_bias"), _read_biases, _write_biases),
    Codec(
        (
            *("softmax_type", "softmax_scale", "num_query_groups", "kv_channels"),
            "qk_layernorm",
        ),
        _read_attention,
        _write_attention,
    ),
    Codec(
        (
            *("gated_linear_unit", "activation_func", "activation_func_clamp_value"),
            *("glu_linear_offset", "bias_activation_fusion"),
        ),
        _read_mlp,
        _write_mlp,
    ),
    Codec(("window_size", "window_attn_skip_freq"), _read_window, _write_window),
)
