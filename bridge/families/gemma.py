"""Gemma 1: norms before attention and MLP, their scales stored less one.

Source: transformers `configuration_gemma.py`, `modeling_gemma.py`.
"""

from collections.abc import Mapping
from typing import Any

from bridge.families import _gemma
from bridge.families._blocks import dense_layer, ignore_tied_head, key_mapping
from bridge.families._family import Family, Field
from bridge.families._field_transform import FieldTransform
from bridge.families._hf_rope import rope

_TANH = "gelu_pytorch_tanh"


def _read_activation(fields: Mapping[str, Any]) -> dict[str, Any]:
    # The first releases say gelu, and transformers computes them with the tanh.
    if fields["hidden_act"] not in ("gelu", _TANH):
        raise ValueError(
            f"hidden_act = {fields['hidden_act']!r}: only 'gelu' and {_TANH!r} are "
            "modelled"
        )
    return {"hidden_act": _TANH}


_ACTIVATION = FieldTransform(
    ("hidden_act",),
    _read_activation,
    lambda config: {"hidden_act": config.hidden_act},
    {"hidden_act": _TANH},
)
_NOT_OF_THE_FIRST = ("query_pre_attn_scalar", "sliding_window")

FAMILY = Family(
    model_type="gemma",
    architecture="GemmaForCausalLM",
    fields={
        **{k: v for k, v in _gemma.FIELDS.items() if k not in _NOT_OF_THE_FIRST},
        "num_key_value_heads": Field(16),
        "max_position_embeddings": Field(8192),
    },
    transforms=(rope(), _ACTIVATION),
    constants={"norm": "rms_zero_centered", "scale_embeddings": True},
    fixed={"attention_dropout": 0.0, "use_bidirectional_attention": False},
    key_mappings=(key_mapping(dense_layer),),
    ignore=ignore_tied_head,
)
