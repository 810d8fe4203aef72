"""HyperCLOVA X SEED: Granite with norms behind attention and MLP.

Source: transformers `configuration_hyperclovax.py`, `modeling_hyperclovax.py`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from bridge.families import granite
from bridge.families._blocks import PRE_NORMS, Rules, attention, key_mapping, mlp, norms
from bridge.families._family import Field
from bridge.families._field_transform import FieldTransform
from bridge.families._hf_rope import rope
from bridge.models import DecoderConfig, LayerKind

_POST_NORMS = {
    "post_norm1": "post_attention_layernorm",
    "post_norm2": "post_feedforward_layernorm",
}


def _layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    del kind
    behind = _POST_NORMS if config.norm_placement == "both" else {}
    return attention(config) + mlp(config) + norms({**PRE_NORMS, **behind})


_SWITCH, _SCALE = "use_post_norm", "attention_multiplier"


def _read_scale(fields: Mapping[str, Any]) -> dict[str, Any]:
    scale, head_dim = fields[_SCALE], fields["head_dim"]
    if scale is None:
        head_dim = head_dim or fields["hidden_size"] // fields["num_attention_heads"]
        scale = head_dim**-0.5
    return {_SCALE: scale}


FAMILY = dataclasses.replace(
    granite.FAMILY,
    also_named=(),
    model_type="hyperclovax",
    architecture="HyperCLOVAXForCausalLM",
    fields={
        **{n: field for n, field in granite.FAMILY.fields.items() if n != _SCALE},
        # A factor of the logits here, where Granite divides by it.
        "logits_scaling": Field(1.0, "logit_scale"),
    },
    transforms=(
        rope(),
        FieldTransform(
            (_SWITCH,),
            lambda fields: {"norm_placement": "both" if fields[_SWITCH] else "pre"},
            lambda config: {_SWITCH: config.norm_placement == "both"},
            {_SWITCH: True},
        ),
        FieldTransform(
            (_SCALE,),
            _read_scale,
            lambda config: {_SCALE: config.attention_multiplier},
            {_SCALE: None},
        ),
    ),
    key_mappings=(key_mapping(_layer),),
)
