"""The text part of Llama 3.2 Vision: Llama, with layers that see between its own.

A text without images skips the layers of cross-attention, so that it is read by Llama's
layers alone. They are left out of an import, and an export has none: its layers are
counted without them. The embedding has rows of images behind the vocabulary, which no
logit is of.

Source: transformers `configuration_mllama.py`, `modeling_mllama.py`.
"""

from collections.abc import Mapping
from typing import Any

from bridge.families._blocks import Rules, dense_layer, outside
from bridge.families._family import Family, Field, KeyMapping, Layers
from bridge.families._field_transform import FieldTransform
from bridge.families._fields import SIZES, tokens
from bridge.families._hf_rope import rope
from bridge.models import DecoderConfig
from bridge.rules._rules import Rule

_LAYERS, _SEEING = "num_hidden_layers", "cross_attention_layers"
_DEFAULT = (3, 8, 13, 18, 23, 28, 33, 38)
_ROWS_OF_IMAGES = 8
_DERIVED = (_LAYERS, "head_dim", "tie_word_embeddings")


def _read_layers(fields: Mapping[str, Any]) -> dict[str, Any]:
    layers, seeing = fields[_LAYERS], fields[_SEEING]
    seeing = _DEFAULT if seeing is None else seeing
    if not isinstance(seeing, list | tuple) or not all(
        isinstance(layer, int) and not isinstance(layer, bool) for layer in seeing
    ):
        raise ValueError(f"{_SEEING} = {seeing!r}: the indices of layers")
    count = layers - len({layer for layer in seeing if 0 <= layer < layers})
    if count < 1:
        raise ValueError(
            f"{_SEEING} = {seeing!r}: leaves none of the {layers} layers to texts"
        )
    return {_LAYERS: count}


def _seeing_layers(config: DecoderConfig) -> tuple[int, ...]:
    """Returns the layers that an import leaves out, as the files count them."""
    seeing = dict(config.passthrough).get(_SEEING, ())
    return _DEFAULT if seeing is None else seeing


def _outer(config: DecoderConfig) -> Rules:
    """Llama's names, and an embedding with more rows than the head."""
    table = Rule(
        "model.embed_tokens.weight",
        "embed_tokens.embedding",
        "table embed -> table embed",
    )
    return (table, *outside()(config)[1:])


_PREFIX = "model.layers.{layer}."

FAMILY = Family(
    model_type="mllama_text_model",
    architecture="MllamaForCausalLM",
    fields={
        **{name: field for name, field in SIZES.items() if name not in _DERIVED},
        **tokens(128000, 128001, 128004),
        "num_key_value_heads": Field(8),
        "max_position_embeddings": Field(131072),
        "rms_norm_eps": Field(1e-5, "norm_eps"),
    },
    transforms=(
        rope(500000.0),
        FieldTransform(
            (_LAYERS, _SEEING),
            _read_layers,
            lambda config: {_LAYERS: config.num_hidden_layers},
            {_LAYERS: 40},
        ),
    ),
    constants={"unscored_tokens": _ROWS_OF_IMAGES},
    fixed={"hidden_act": "silu", "tie_word_embeddings": False},
    passthrough={"dropout": 0.0, _SEEING: _DEFAULT},
    left_out={_SEEING: ()},
    key_mappings=(
        KeyMapping(_outer, Layers(_PREFIX, dense_layer)),
        KeyMapping(_outer, Layers(_PREFIX, dense_layer, _seeing_layers)),
    ),
    module_names=1,
)
