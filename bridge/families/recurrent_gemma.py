"""RecurrentGemma: gated linear recurrent units, and attention in every third layer.

Source: transformers `configuration_recurrent_gemma.py`, `modeling_recurrent_gemma.py`.
"""

from collections.abc import Mapping
from typing import Any

import ml_dtypes

from bridge.families._blocks import (
    Rules,
    attention,
    ignore_tied_head,
    linear,
    mlp,
    norms,
    outside,
)
from bridge.families._family import Family, Field, KeyMapping, Layers
from bridge.families._field_transform import FieldTransform
from bridge.families._fields import SIZES, attention_bias, tokens
from bridge.families._hf_rope import rope
from bridge.families._layer_types import SLIDING
from bridge.models import DecoderConfig, LayerKind
from bridge.rules._rules import Rule

_AT = "temporal_block."
_NORMS = {
    "temporal_pre_norm": "input_layernorm",
    "channel_pre_norm": "pre_feedforward_layernorm",
}
_OWN = "(lru_heads lru_dim) -> lru_heads lru_dim"
_INTO = "(lru_heads lru_dim) embed -> embed lru_heads lru_dim"


def _gate(name: str, to: str) -> Rules:
    kernel, bias = "lru_heads lru_dim lru_dim_out", "lru_heads lru_dim"
    return (
        Rule(f"{name}_weight", f"{to}.kernel", f"{kernel} -> {kernel}"),
        Rule(f"{name}_bias", f"{to}.bias", f"{bias} -> {bias}"),
    )


_RG_LRU: Rules = (
    *linear(f"{_AT}linear_y", "rg_lru.z_proj", _INTO, _OWN),
    *linear(f"{_AT}linear_x", "rg_lru.x_proj", _INTO, _OWN),
    *linear(
        f"{_AT}conv_1d",
        "rg_lru.x_conv",
        "(lru_heads lru_dim) one conv_kernel -> lru_heads lru_dim (one conv_kernel)",
        _OWN,
    ),
    *_gate(f"{_AT}rg_lru.input_gate", "rg_lru.input_gate"),
    *_gate(f"{_AT}rg_lru.recurrent_gate", "rg_lru.decay_gate"),
    Rule(f"{_AT}rg_lru.recurrent_param", "rg_lru.decay_rate", _OWN),
    *linear(
        f"{_AT}linear_out",
        "rg_lru.o_proj",
        "embed (lru_heads lru_dim) -> lru_heads lru_dim embed",
        "embed -> embed",
    ),
)


def _layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    mixer = _RG_LRU if kind.mixer == "rg_lru" else attention(config, _AT)
    return mixer + mlp(config, "mlp_block.") + norms(_NORMS)


_TYPES = {"recurrent": "rg_lru", "attention": SLIDING}
_DEFAULT_TYPES = ("recurrent", "recurrent", "attention")


def _read_types(fields: Mapping[str, Any]) -> dict[str, Any]:
    given, layers = list(fields["block_types"]), fields["num_hidden_layers"]
    if not given:
        raise ValueError("block_types is empty: list the types of the first layers")
    # transformers takes whatever is not recurrent for attention.
    if unknown := sorted({str(kind) for kind in given} - set(_TYPES)):
        raise ValueError(f"block_types has {unknown}: known are {sorted(_TYPES)}")
    types = [_TYPES[given[layer % len(given)]] for layer in range(layers)]
    return {"layer_types": tuple(types)}


def _write_types(config: DecoderConfig) -> dict[str, Any]:
    names = {ours: name for name, ours in _TYPES.items()}
    types = config.layer_types or (SLIDING,) * config.num_hidden_layers
    if unknown := sorted(set(types) - set(names)):
        raise ValueError(f"layer_types has {unknown}: block_types has {sorted(names)}")
    return {"block_types": [names[kind] for kind in types]}


def _read_width(fields: Mapping[str, Any]) -> dict[str, Any]:
    width, heads = fields["lru_width"], fields["num_attention_heads"]
    hidden = fields["hidden_size"]
    width = hidden if width is None else width
    if width % heads:
        raise ValueError(
            f"lru_width {width} is not a multiple of num_attention_heads {heads}, the "
            "number of its blocks"
        )
    return {
        "rg_lru.num_heads": heads,
        "rg_lru.head_dim": width // heads,
        # A factor of bfloat16, whatever the dtype of the weights.
        "embedding_multiplier": float(ml_dtypes.bfloat16(hidden**0.5)),
    }


def _write_width(config: DecoderConfig) -> dict[str, Any]:
    sizes = config.rg_lru
    assert sizes is not None
    return {"lru_width": sizes.num_heads * sizes.head_dim}


_WIDTH = FieldTransform(("lru_width",), _read_width, _write_width, {"lru_width": None})

# Gate and up share the width that the file has.
_INSIDE = FieldTransform(
    ("intermediate_size",),
    lambda fields: {"intermediate_size": fields["intermediate_size"] // 2},
    lambda config: {"intermediate_size": 2 * config.intermediate_size},
    {"intermediate_size": 7680},
)
# A variance of initial weights, which files repeat.
_INITIAL = FieldTransform(
    ("final_w_init_variance_scale",),
    lambda fields: {},
    lambda config: {"final_w_init_variance_scale": 2 / config.num_hidden_layers},
    {"final_w_init_variance_scale": None},
)
_UNSAID = ("intermediate_size", "max_position_embeddings", "initializer_range")

FAMILY = Family(
    model_type="recurrent_gemma",
    architecture="RecurrentGemmaForCausalLM",
    fields={
        **{name: field for name, field in SIZES.items() if name not in _UNSAID},
        **tokens(2, 1, 0),
        **attention_bias(out=False),
        "vocab_size": Field(256000),
        "hidden_size": Field(2560),
        "num_hidden_layers": Field(26),
        "num_attention_heads": Field(10),
        "tie_word_embeddings": Field(True),
        "rms_norm_eps": Field(1e-6, "norm_eps"),
        "hidden_activation": Field("gelu_pytorch_tanh", "hidden_act"),
        "attention_window_size": Field(
            2048, "sliding_window", aliases=("sliding_window",)
        ),
        "conv1d_width": Field(4, "rg_lru.kernel_size"),
        "logits_soft_cap": Field(30.0, "final_logit_softcapping"),
    },
    transforms=(
        rope(partial=0.5, types=("default",)),
        FieldTransform(
            ("block_types",),
            _read_types,
            _write_types,
            {"block_types": _DEFAULT_TYPES},
        ),
        _WIDTH,
        _INSIDE,
        _INITIAL,
    ),
    constants={
        "norm": "rms_zero_centered",
        "mlp_bias": True,
        "attention_out_bias": True,
    },
    fixed={"attention_dropout": 0.0},
    # How weights are initialized.
    passthrough={"w_init_variance_scale": 0.01},
    key_mappings=(
        KeyMapping(
            outside(norm="model.final_norm"), Layers("model.layers.{layer}.", _layer)
        ),
    ),
    ignore=ignore_tied_head,
)
