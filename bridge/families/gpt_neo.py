"""GPT-Neo: learned positions, scores that are not scaled, layers that slide in turn.

Source: transformers `configuration_gpt_neo.py`, `modeling_gpt_neo.py`.
"""

from collections.abc import Mapping
from typing import Any

from bridge.families._blocks import (
    Rules,
    attention,
    ignore_tied_head,
    norms,
    outside,
    ungated_mlp,
)
from bridge.families._family import Family, Field, KeyMapping, Layers
from bridge.families._field_transform import FieldTransform
from bridge.families._fields import tokens
from bridge.families._gpt import LAYERS
from bridge.families._layer_types import FULL, SLIDING
from bridge.models import DecoderConfig, LayerKind
from bridge.rules._rules import Rule


def _layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    del kind
    named = {"ln_1": "input_layernorm", "ln_2": "pre_feedforward_layernorm"}
    return (
        *attention(config, "attn.attention.", out="out_proj"),
        *ungated_mlp(config, "mlp.c_fc", "mlp.c_proj"),
        *norms(named, bias=True),
    )


def _key_mapping(prefix: str) -> KeyMapping:
    outer = outside(f"{prefix}wte", f"{prefix}ln_f")
    positions = Rule(
        f"{prefix}wpe.weight",
        "embed_positions.embedding",
        "positions embed -> positions embed",
    )
    return KeyMapping(
        lambda config: (*outer(config), positions),
        Layers(prefix + "h.{layer}.", _layer),
    )


_TYPES, _LISTED = "attention_types", "attention_layers"
_NAMES = {"global": FULL, "local": SLIDING}


def _read_types(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Reads kinds and how often they come: `[[["global", "local"], 12]]`."""
    groups, count = fields[_TYPES] or [[["global", "local"], 12]], fields["num_layers"]
    found = [kind for kinds, times in groups for kind in kinds * times]
    listed = fields[_LISTED]
    if len(found) != count or set(found) - set(_NAMES):
        raise ValueError(
            f"{_TYPES} = {groups!r}: {', '.join(_NAMES)} for each of {count} layers"
        )
    if listed is not None and list(listed) != found:
        raise ValueError(f"{_LISTED} = {listed!r}: {_TYPES} says {found}")
    return {"layer_types": tuple(_NAMES[kind] for kind in found)}


def _write_types(config: DecoderConfig) -> dict[str, Any]:
    theirs = {ours: name for name, ours in _NAMES.items()}
    types = config.layer_types or (FULL,) * config.num_hidden_layers
    kinds = [theirs[kind] for kind in types]
    return {_TYPES: [[kinds, 1]], _LISTED: kinds}


_WIDTH = "intermediate_size"


def _read_width(fields: Mapping[str, Any]) -> dict[str, Any]:
    width = fields[_WIDTH]
    return {_WIDTH: 4 * fields["hidden_size"] if width is None else width}


FAMILY = Family(
    model_type="gpt_neo",
    architecture="GPTNeoForCausalLM",
    fields={
        **tokens(50256, 50256),
        "vocab_size": Field(50257),
        "hidden_size": Field(2048),
        "num_layers": Field(24, "num_hidden_layers"),
        "num_heads": Field(16, "num_attention_heads"),
        "max_position_embeddings": Field(2048),
        "window_size": Field(256, "sliding_window"),
        "activation_function": Field("gelu_new", "hidden_act"),
        "layer_norm_epsilon": Field(1e-5, "norm_eps"),
        "initializer_range": Field(0.02),
        "tie_word_embeddings": Field(True),
    },
    transforms=(
        FieldTransform(
            (_TYPES, _LISTED),
            _read_types,
            _write_types,
            {_TYPES: None, _LISTED: None},
        ),
        FieldTransform(
            (_WIDTH,),
            _read_width,
            lambda config: {_WIDTH: config.intermediate_size},
            {_WIDTH: None},
        ),
    ),
    constants={
        **LAYERS,
        "rope": None,
        "attention_bias": False,
        "attention_multiplier": 1.0,
    },
    # These change no logit.
    passthrough={
        "resid_dropout": 0.0,
        "embed_dropout": 0.0,
        "attention_dropout": 0.0,
        "classifier_dropout": 0.1,
        "summary_type": "cls_index",
        "summary_use_proj": True,
        "summary_activation": None,
        "summary_proj_to_labels": True,
        "summary_first_dropout": 0.1,
        "gradient_checkpointing": False,
    },
    key_mappings=(_key_mapping("transformer."), _key_mapping("")),
    ignore=lambda config: (
        *ignore_tied_head(config),
        *("transformer.h.{layer}.attn.attention.bias", "h.{layer}.attn.attention.bias"),
    ),
)
