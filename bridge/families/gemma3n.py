"""Gemma 3n, the text model: streams beside the residual one, and inputs of layers.

Each layer has an input of each token, and the last layers attend to keys and values of
earlier ones. Of the models that also see and hear, the text part is read.

Source: transformers `configuration_gemma3n.py`, `modeling_gemma3n.py`.
"""

from collections.abc import Mapping
from typing import Any

from bridge.families import _gemma
from bridge.families._blocks import Rules, attention, linear, mlp, norm, norms
from bridge.families._family import Family, Field, KeyMapping, Layers
from bridge.families._field_transform import FieldTransform
from bridge.families._fields import SIZES, attention_bias, tokens
from bridge.families._hf_rope import rope_by_layer_type
from bridge.families._layer_types import layer_types
from bridge.models import DecoderConfig, LayerKind
from bridge.rules._rules import Rule

_STREAMS = (
    norm("altup.router_norm", "altup.router_norm"),
    *linear("altup.modality_router", "altup.router", "streams embed -> embed streams"),
    *linear(
        "altup.prediction_coefs",
        "altup.prediction",
        "(streams_out streams_in) streams -> streams streams_out streams_in",
    ),
    *linear(
        "altup.correction_coefs",
        "altup.correction",
        "streams_out streams -> streams streams_out",
    ),
    Rule("altup.correct_output_scale", "altup.output_scale", "embed -> embed"),
)
_LAUREL = (
    *linear(
        "laurel.linear_left", "laurel.left", "laurel_rank embed -> embed laurel_rank"
    ),
    *linear(
        "laurel.linear_right", "laurel.right", "embed laurel_rank -> laurel_rank embed"
    ),
    norm("laurel.post_laurel_norm", "laurel.norm"),
)
_PROJECTIONS = tuple(
    Rule(
        f"model.{name}.{{other_stream}}.weight",
        f"streams.{ours}",
        "embed_out embed -> embed embed_out",
    )
    for name, ours in (
        ("altup_projections", "apart"),
        ("altup_unembed_projections", "together"),
    )
)


def _layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    own = attention(config)
    return (
        *(_gemma.without_key_value(own) if kind.reuses else own),
        *mlp(config, width="reusing_mlp" if kind.reuses else "mlp"),
        *norms({name: name for name in _gemma.NORMS}),
        *_gemma.LAYER_INPUT,
        *_STREAMS,
        *_LAUREL,
    )


def _outer(config: DecoderConfig) -> Rules:
    return _gemma.outer(config) + _PROJECTIONS


_SMALL = {
    "intermediate_size": 16384,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
    "num_kv_shared_layers": 15,
    "altup_num_inputs": 4,
    "altup_active_idx": 0,
}


def _read_small(fields: Mapping[str, Any]) -> dict[str, Any]:
    width, layers = fields["intermediate_size"], fields["num_hidden_layers"]
    if isinstance(width, list | tuple):
        if len(width) != layers or len(set(width)) != 1:
            raise ValueError(
                f"intermediate_size = {width!r}: the same width for each of the "
                f"{layers} layers"
            )
        width = width[0]
    values = {
        "intermediate_size": width,
        "full_attention.head_dim": fields["head_dim"],
        "full_attention.num_key_value_heads": fields["num_key_value_heads"],
        "per_layer_input.size": fields["hidden_size_per_layer_input"],
        "per_layer_input.vocab_size": fields["vocab_size_per_layer_input"],
        "altup.num_streams": fields["altup_num_inputs"],
        "altup.active": fields["altup_active_idx"],
    }
    if reusing := fields["num_kv_shared_layers"]:
        values["kv_sharing.num_layers"] = reusing
        values["kv_sharing.intermediate_size"] = width
    return values


def _write_small(config: DecoderConfig) -> dict[str, Any]:
    inputs, altup, sharing = config.per_layer_input, config.altup, config.kv_sharing
    full, width = config.full_attention, config.intermediate_size
    assert inputs is not None and altup is not None and full is not None
    own = (config.head_dim, config.num_key_value_heads, False)
    if (full.head_dim, full.num_key_value_heads, full.shared_key_value) != own:
        raise ValueError(f"full_attention = {full!r}: sizes of its own")
    if sharing is not None and sharing.intermediate_size != width:
        raise ValueError(
            f"kv_sharing.intermediate_size {sharing.intermediate_size}: the {width} of "
            "intermediate_size"
        )
    return {
        "intermediate_size": [width] * config.num_hidden_layers,
        "hidden_size_per_layer_input": inputs.size,
        "vocab_size_per_layer_input": inputs.vocab_size,
        "num_kv_shared_layers": sharing.num_layers if sharing else 0,
        "altup_num_inputs": altup.num_streams,
        "altup_active_idx": altup.active,
    }


def _read_sparsity(fields: Mapping[str, Any]) -> dict[str, Any]:
    layers, given = fields["num_hidden_layers"], fields["activation_sparsity_pattern"]
    if given is None:
        sparse = 10 if layers > 10 else 0
        given = [0.95] * sparse + [0.0] * (layers - sparse)
    cut = tuple(i for i, part in enumerate(given) if part > 0)
    parts = sorted({given[i] for i in cut})
    if len(given) != layers or len(parts) > 1:
        raise ValueError(
            f"activation_sparsity_pattern = {given!r}: 0 or one other number for each "
            f"of the {layers} layers"
        )
    return {"gate_sparsity": parts[0] if parts else None, "cut_gate_layers": cut}


def _write_sparsity(config: DecoderConfig) -> dict[str, Any]:
    part, cut = config.gate_sparsity or 0.0, config.cut_gate_layers
    layers = range(config.num_hidden_layers)
    return {"activation_sparsity_pattern": [part if i in cut else 0.0 for i in layers]}


FAMILY = Family(
    model_type="gemma3n_text",
    architecture="Gemma3nForCausalLM",
    fields={
        **{name: field for name, field in SIZES.items() if name != "intermediate_size"},
        **tokens(2, 1, 0),
        **attention_bias(),
        "num_key_value_heads": Field(2),
        "head_dim": Field(256),
        "max_position_embeddings": Field(32768),
        "tie_word_embeddings": Field(True),
        "rms_norm_eps": Field(1e-6, "norm_eps"),
        "sliding_window": Field(512),
        "final_logit_softcapping": Field(30.0),
        "laurel_rank": Field(64),
    },
    transforms=(
        rope_by_layer_type(1e6, 10000.0, "rope_local_base_freq"),
        layer_types(5),
        FieldTransform(tuple(_SMALL), _read_small, _write_small, _SMALL),
        FieldTransform(
            ("activation_sparsity_pattern",),
            _read_sparsity,
            _write_sparsity,
            {"activation_sparsity_pattern": None},
        ),
    ),
    constants={
        **_gemma.CONSTANTS,
        "norm": "rms_wide",
        "qk_norm": "head",
        "value_norm": True,
        "attention_multiplier": 1.0,
    },
    fixed={
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_dropout": 0.0,
        "altup_correct_scale": True,
    },
    # transformers bounds coefficients by it in training alone.
    passthrough={"altup_coef_clip": 120.0},
    optional=("full_attention", "per_layer_input", "kv_sharing", "altup"),
    key_mappings=(KeyMapping(_outer, Layers("model.layers.{layer}.", _layer)),),
    ignore=_gemma.ignore,
)
