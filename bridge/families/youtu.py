"""Youtu-LLM: a dense model with latent attention.

Source: transformers `configuration_youtu.py`, `modeling_youtu.py`.
"""

from collections.abc import Mapping
from typing import Any

from bridge.families import _deepseek
from bridge.families._blocks import (
    PRE_NORMS,
    Rules,
    ignore_tied_head,
    key_mapping,
    latent_attention,
    mlp,
    norms,
)
from bridge.families._family import Family, Field
from bridge.families._field_transform import FieldTransform
from bridge.families._fields import tokens
from bridge.families._hf_rope import rope
from bridge.models import DecoderConfig, LayerKind


def _layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    del kind
    return latent_attention(config) + mlp(config) + norms(PRE_NORMS)


_STD, _OF_EMBEDDING = "initializer_range", "embedding_initializer_range"


def _read_std(fields: Mapping[str, Any]) -> dict[str, Any]:
    width, std = fields["hidden_size"], fields[_STD]
    # That of the embedding is of weights before training, which no file holds: an
    # export says transformers' default for it, twice the other.
    return {_STD: 2 / (5 * width) ** 0.5 if std is None else std}


def _write_std(config: DecoderConfig) -> dict[str, Any]:
    std = config.initializer_range
    return {_STD: std, _OF_EMBEDDING: 2 * std}


FAMILY = Family(
    model_type="youtu",
    architecture="YoutuForCausalLM",
    fields={
        **{name: f for name, f in _deepseek.FIELDS.items() if name != _STD},
        **tokens(128000, 128001),
        "num_key_value_heads": Field(16),
        "max_position_embeddings": Field(131072),
        "tie_word_embeddings": Field(True),
    },
    transforms=(
        rope(interleaved=True, interleave_field="rope_interleave"),
        FieldTransform(
            (_STD, _OF_EMBEDDING),
            _read_std,
            _write_std,
            {_STD: None, _OF_EMBEDDING: None},
        ),
        _deepseek.DERIVED_SIZES,
    ),
    fixed={"hidden_act": "silu", "attention_dropout": 0.0},
    key_mappings=(key_mapping(_layer),),
    ignore=ignore_tied_head,
)
