"""Ministral 3 and Devstral 2, the text models: Mistral with a yarn of its own.

Models whose queries grow with their position (`llama_4_scaling_beta` is not 0) are
refused.

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
from bridge.models import DecoderConfig

_ROPES = ("rope_scaling", "rope_parameters")
_BETA = "llama_4_scaling_beta"


def _rope() -> FieldTransform:
    base = rope(1e6)

    def read(fields: Mapping[str, Any]) -> dict[str, Any]:
        given = {name: fields[name] for name in _ROPES if fields.get(name)}
        if not given:
            raise ValueError(f"rope_parameters are missing, whose {_BETA} is 0.1 then")
        for name, value in given.items():
            beta = value.get(_BETA) if isinstance(value, Mapping) else None
            if beta != 0:
                raise ValueError(f"{name}: {_BETA} = {beta!r}: only 0 is modelled")
        plain = {
            name: {k: v for k, v in value.items() if k != _BETA}
            for name, value in given.items()
        }
        return base.read({**fields, **plain})

    def write(config: DecoderConfig) -> dict[str, Any]:
        written = base.write(config)
        for name in _ROPES:
            if written[name] is not None:
                written[name] |= {_BETA: 0.0}
        return written

    return FieldTransform(base.names, read, write, base.defaults)


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
    transforms=(_rope(), window_of_all()),
    fixed={"hidden_act": "silu", "attention_dropout": 0.0},
    key_mappings=(key_mapping(dense_layer),),
    ignore=ignore_tied_head,
)
