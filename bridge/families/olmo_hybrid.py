"""OLMo Hybrid: OLMo 3 with gated delta nets in three layers of four.

Layers with a delta net norm what they read, the others what they add. transformers
writes the norms of both under one name, and the convolutions in equal parts; an export
has the names and parts of the published files, which transformers reads as well.

Source: transformers `configuration_olmo_hybrid.py`, `modeling_olmo_hybrid.py`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from bridge.families import _olmo
from bridge.families._blocks import (
    Rules,
    attention,
    ignore_tied_head,
    key_mapping,
    linear,
    mlp,
    norms,
)
from bridge.families._family import Family, Field
from bridge.families._field_transform import FieldTransform
from bridge.families._hf_rope import rope
from bridge.families._layer_types import FULL, mixer_types
from bridge.models import DecoderConfig, LayerKind
from bridge.rules._rules import Rule

Fields = Mapping[str, Any]
_LINEAR = "linear_attention"
_AT, _TO = "linear_attn.", "delta_net."
_KEYS = "(key_heads key_dim)"
_VALUES = "(value_heads value_dim)"
_OF_KEYS = f"{_KEYS} embed -> embed key_heads key_dim"
_OF_VALUES = f"{_VALUES} embed -> embed value_heads value_dim"
_OF_HEADS = "value_heads embed -> embed value_heads"
_CONV_OF_KEYS = f"{_KEYS} one conv_kernel -> key_heads key_dim (one conv_kernel)"
_CONV_OF_VALUES = (
    f"{_VALUES} one conv_kernel -> value_heads value_dim (one conv_kernel)"
)
_CONVS = {"q": _CONV_OF_KEYS, "k": _CONV_OF_KEYS, "v": _CONV_OF_VALUES}
_APART: Rules = tuple(
    Rule(f"{_AT}{name}_conv1d.weight", f"{_TO}{name}_conv.kernel", layout)
    for name, layout in _CONVS.items()
)
_JOINED: Rules = (
    Rule(
        f"{_AT}conv1d.weight",
        tuple(f"{_TO}{name}_conv.kernel" for name in _CONVS),
        tuple(_CONVS.values()),
    ),
)
_DELTA_NET: Rules = (
    *linear(_AT + "q_proj", _TO + "q_proj", _OF_KEYS),
    *linear(_AT + "k_proj", _TO + "k_proj", _OF_KEYS),
    *linear(_AT + "v_proj", _TO + "v_proj", _OF_VALUES),
    *linear(_AT + "g_proj", _TO + "z_proj", _OF_VALUES),
    *linear(_AT + "a_proj", _TO + "a_proj", _OF_HEADS),
    *linear(_AT + "b_proj", _TO + "b_proj", _OF_HEADS),
    Rule(_AT + "A_log", _TO + "a_log", "value_heads -> value_heads"),
    Rule(_AT + "dt_bias", _TO + "dt_bias", "value_heads -> value_heads"),
    Rule(_AT + "o_norm.weight", _TO + "norm.scale", "value_dim -> value_dim"),
    *linear(
        _AT + "o_proj",
        _TO + "o_proj",
        f"embed {_VALUES} -> value_heads value_dim embed",
    ),
)


def _layer(
    convs: Rules, read: tuple[str, str], added: tuple[str, str]
) -> Callable[[DecoderConfig, LayerKind], Rules]:
    """Returns the rules of layers.

    Args:
      convs: Rules of the convolutions.
      read: Names of the norms of what layers with a delta net read.
      added: Names of the norms of what the others add.
    """
    before = dict(zip(read, _BEFORE, strict=True))
    after = dict(zip(added, _olmo.NORMS, strict=True))

    def rules(config: DecoderConfig, kind: LayerKind) -> Rules:
        if kind.mixer == "delta_net":
            return _DELTA_NET + convs + mlp(config) + norms(before)
        return attention(config) + mlp(config) + norms(after)

    return rules


_BEFORE = ("input_layernorm", "pre_feedforward_layernorm")
_PUBLISHED = ("attention_layer_norm", "feedforward_layer_norm")
_WRITTEN = ("feedforward_layer_norm", "post_feedforward_layernorm")
_IN_MEMORY = ("input_layernorm", "post_attention_layernorm")


def _absent(fields: Fields) -> list[str]:
    count = fields["num_hidden_layers"]
    types = [FULL if i % 4 == 3 else _LINEAR for i in range(count)]
    return types if FULL in types else [*types[:-1], FULL]


_TYPES = mixer_types({_LINEAR: "delta_net"}, _absent)


def _read_types(fields: Fields) -> dict[str, Any]:
    given = fields["layer_types"] or _absent(fields)
    if missing := sorted({FULL, _LINEAR} - set(given)):
        raise ValueError(
            f"layer_types = {given!r}: no {' and no '.join(missing)} layer, of which "
            "transformers requires one"
        )
    return _TYPES.read(fields)


_HEADS = {"linear_num_key_heads": None, "linear_num_value_heads": None}
_DIMS = {"linear_key_head_dim": None, "linear_value_head_dim": None}
_TURNS = "linear_allow_neg_eigval"


def _read_sizes(fields: Fields) -> dict[str, Any]:
    keys, values = (
        fields["num_attention_heads"] if fields[name] is None else fields[name]
        for name in _HEADS
    )
    width, value_width = (fields[name] for name in _DIMS)
    if width is None:
        width = int(0.75 * fields["hidden_size"] / keys)
    return {
        "delta_net.num_key_heads": keys,
        "delta_net.num_value_heads": values,
        "delta_net.key_head_dim": width,
        "delta_net.value_head_dim": 2 * width if value_width is None else value_width,
        "delta_net.kernel_size": fields["linear_conv_kernel_dim"],
        "delta_net.beta_factor": 2.0 if fields[_TURNS] else 1.0,
    }


def _write_sizes(config: DecoderConfig) -> dict[str, Any]:
    delta = config.delta_net
    assert delta is not None
    return {
        "linear_num_key_heads": delta.num_key_heads,
        "linear_num_value_heads": delta.num_value_heads,
        "linear_key_head_dim": delta.key_head_dim,
        "linear_value_head_dim": delta.value_head_dim,
        "linear_conv_kernel_dim": delta.kernel_size,
        _TURNS: delta.beta_factor == 2,
    }


_SIZES = FieldTransform(
    (*_HEADS, *_DIMS, "linear_conv_kernel_dim", _TURNS),
    _read_sizes,
    _write_sizes,
    {**_HEADS, **_DIMS, "linear_conv_kernel_dim": 4, _TURNS: True},
)

_ABSENT_BASE = 1e4
_ROPE = rope(_ABSENT_BASE)
_PARAMETERS, _BASE = "rope_parameters", "rope_theta"
_STILL = {"rope_type": "default", "rope_theta": None}


def _read_rope(fields: Fields) -> dict[str, Any]:
    """Reads a rope; a base of null, in it or beside it, means that nothing turns."""
    given = fields[_PARAMETERS] or fields["rope_scaling"]
    inside = isinstance(given, Mapping) and _BASE in given
    if (given if inside else fields)[_BASE] is None:
        return {"rope": None}
    # That of a rope is before that beside it, which may be the default.
    is_default = inside and fields[_BASE] == _ABSENT_BASE
    return _ROPE.read({**fields, _BASE: None} if is_default else fields)


def _write_rope(config: DecoderConfig) -> dict[str, Any]:
    return {_PARAMETERS: _STILL} if config.rope is None else _ROPE.write(config)


FAMILY = Family(
    model_type="olmo_hybrid",
    architecture="OlmoHybridForCausalLM",
    fields={
        **{name: field for name, field in _olmo.FIELDS.items() if name != "head_dim"},
        "bos_token_id": Field(None),
        "eos_token_id": Field(100257),
        "pad_token_id": Field(100277),
        "max_position_embeddings": Field(65536),
        "rms_norm_eps": Field(1e-6, "norm_eps"),
    },
    transforms=(
        FieldTransform(
            _ROPE.names,
            _read_rope,
            _write_rope,
            {**_ROPE.defaults, _BASE: _ABSENT_BASE},
        ),
        FieldTransform(_TYPES.names, _read_types, _TYPES.write, _TYPES.defaults),
        _SIZES,
    ),
    constants={
        **_olmo.CONSTANTS,
        "recurrent_norm_placement": "pre",
        "learned_positions": False,
        # Of the kernel that the model was trained with, whatever the config says.
        "delta_net.norm_eps": 1e-5,
    },
    optional=("rope", "delta_net"),
    fixed=_olmo.FIXED,
    # Of the initial weights.
    passthrough={
        "linear_a_log_min": 0.0,
        "linear_a_log_max": 16.0,
        "linear_dt_min": 0.001,
        "linear_dt_max": 0.1,
        "linear_dt_init_floor": 1e-4,
    },
    key_mappings=(
        key_mapping(_layer(_APART, _PUBLISHED, _olmo.NORMS)),
        key_mapping(_layer(_APART, _PUBLISHED, _WRITTEN)),
        key_mapping(_layer(_JOINED, _IN_MEMORY, _olmo.NORMS)),
    ),
    ignore=ignore_tied_head,
)
