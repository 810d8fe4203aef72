"""Ministral 3 and Devstral 2, the text models: Mistral with a yarn of its own.

Queries grow with their position, by `llama_4_scaling_beta` of the rope.

Source: transformers `configuration_ministral3.py`, `modeling_ministral3.py`.
"""

from collections.abc import Mapping
from typing import Any

from bridge.families._blocks import dense_layer, ignore_tied_head, key_mapping
from bridge.families._family import Family, Field
from bridge.families._field_transform import FieldTransform
from bridge.families._fields import SIZES, tokens
from bridge.families._hf_rope import rope
from bridge.families._layer_types import window_of_all
from bridge.models import DecoderConfig, QueryScaleConfig, RopeConfig

_ROPES = ("rope_scaling", "rope_parameters")
_BETA = "llama_4_scaling_beta"
_ABSENT = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    _BETA: 0.1,
}
_BASE = rope(1e6)


def _read(fields: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: fields[name] for name in _ROPES if fields.get(name)}
    given = given or {"rope_parameters": _ABSENT}
    betas = [
        rope.get(_BETA) if isinstance(rope, Mapping) else None
        for rope in given.values()
    ]
    if wrong := [b for b in betas if not isinstance(b, float | int) or b != betas[0]]:
        raise ValueError(f"{_BETA} = {wrong[0]!r}: a number, the same in each rope")
    plain = {
        name: {k: v for k, v in rope.items() if k != _BETA}
        for name, rope in given.items()
    }
    values = _BASE.read({**fields, **plain})
    return {**values, **_query_scale(float(betas[0] or 0), values["rope"])}


def _query_scale(beta: float, read: RopeConfig) -> dict[str, Any]:
    if not beta:
        return {}
    length = read.original_max_position_embeddings
    if length is None:
        raise ValueError(
            f"{_BETA} = {beta}: the rope has no original_max_position_embeddings, "
            "after which queries grow"
        )
    return {"query_scale": QueryScaleConfig(beta, length)}


def _write(config: DecoderConfig) -> dict[str, Any]:
    written, scale = _BASE.write(config), config.query_scale
    beta = 0.0 if scale is None else scale.beta
    ropes = {
        name: {**written[name], _BETA: beta}
        for name in _ROPES
        if written[name] is not None
    }
    return {**written, **ropes}


FAMILY = Family(
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    fields={
        **SIZES,
        **tokens(1, 2, 11),
        "num_key_value_heads": Field(8),
        "head_dim": Field(128),
        "max_position_embeddings": Field(262144),
        "rms_norm_eps": Field(1e-5, "norm_eps"),
    },
    transforms=(
        FieldTransform(_BASE.names, _read, _write, _BASE.defaults),
        window_of_all(),
    ),
    fixed={"hidden_act": "silu", "attention_dropout": 0.0},
    key_mappings=(key_mapping(dense_layer),),
    ignore=ignore_tied_head,
)
