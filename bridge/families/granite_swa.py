"""Granite with a window: sinks, and a rope or none of each layer's own base.

Source: transformers `configuration_granite_swa.py`, `modeling_granite_swa.py`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from bridge.families import granite
from bridge.families._blocks import Rules, dense_layer, key_mapping
from bridge.families._family import Field
from bridge.families._field_transform import FieldTransform
from bridge.families._hf_rope import rope
from bridge.families._layer_types import (
    FULL,
    SLIDING,
    first_of_four_full,
    sliding_or_full,
)
from bridge.models import DecoderConfig, LayerKind
from bridge.rules._rules import Rule

SINKS = Rule("self_attn.sinks", "self_attn.sinks", "heads -> heads")
"""A score of each head that has no value."""

_TYPES = sliding_or_full(first_of_four_full)
_ROPE, _THETAS = rope(), "layer_rope_theta"


def _read_ropes(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the base of each layer, 0 for one without a rope."""
    types = _TYPES.read(fields)["layer_types"]
    read, thetas = _ROPE.read(fields), fields[_THETAS]
    if thetas is None:
        return read | {"layer_types": types}
    if len(thetas) != len(types):
        raise ValueError(f"{_THETAS} has {len(thetas)} entries for {len(types)} layers")
    of_type = {
        kind: {theta for theta, own in zip(thetas, types, strict=True) if own == kind}
        - {0}
        for kind in (FULL, SLIDING)
    }
    if wrong := [kind for kind, bases in of_type.items() if len(bases) > 1]:
        raise ValueError(
            f"{_THETAS} has several bases for layers of type {', '.join(wrong)}: one "
            "for each type is modelled"
        )
    base = read["rope"]
    full, sliding = (
        dataclasses.replace(base, rope_theta=next(iter(bases), base.rope_theta))
        for bases in of_type.values()
    )
    return {
        "layer_types": types,
        "rope": full,
        "sliding_rope": None if sliding == full else sliding,
        "no_rope_layers": tuple(i for i, theta in enumerate(thetas) if not theta),
    }


def _write_ropes(config: DecoderConfig) -> dict[str, Any]:
    full, sliding = config.rope, config.sliding_rope or config.rope
    assert full is not None and sliding is not None
    written = _TYPES.write(config)
    thetas = [
        0 if layer in config.no_rope_layers else rope.rope_theta
        for layer, kind in enumerate(written["layer_types"])
        for rope in (sliding if kind == SLIDING else full,)
    ]
    return {**_ROPE.write(config), **written, _THETAS: thetas}


LAYERS = FieldTransform(
    (*_ROPE.names, *_TYPES.names, _THETAS),
    _read_ropes,
    _write_ropes,
    {**_ROPE.defaults, **_TYPES.defaults, _THETAS: None},
)
"""Which layers slide, and the base of each layer's rope."""


def _layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    return (*dense_layer(config, kind), SINKS)


FAMILY = dataclasses.replace(
    granite.FAMILY,
    also_named=(),
    model_type="granite_swa",
    architecture="GraniteSWAForCausalLM",
    fields={
        **granite.FAMILY.fields,
        "bos_token_id": Field(100257),
        "eos_token_id": Field(100257),
        "num_key_value_heads": Field(4),
        "max_position_embeddings": Field(8192),
        "rms_norm_eps": Field(1e-5, "norm_eps"),
        "tie_word_embeddings": Field(True),
        "sliding_window": Field(128),
    },
    transforms=(LAYERS,),
    constants={"attention_sinks": True},
    key_mappings=(key_mapping(_layer),),
)
