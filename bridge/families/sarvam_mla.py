"""Sarvam 105B: DeepSeek-V3 whose queries are not compressed.

Source: transformers `configuration_sarvam_mla.py`, `modeling_deepseek_v3.py`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from bridge.families import _deepseek, deepseek_v3
from bridge.families._family import Field
from bridge.families._field_transform import FieldTransform
from bridge.families._fields import moe
from bridge.families._hf_rope import rope
from bridge.families._layer_types import first_dense

_ROPE = rope(interleaved=True, interleave_field="rope_interleave")
_SCALING, _YARN = "rope_scaling", "deepseek_yarn"


def _read_rope(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the releases' name of a type that is yarn."""
    scaling = dict(fields[_SCALING] or {})
    if _YARN in (scaling.get("type"), scaling.get("rope_type")):
        scaling.pop("type", None)
        scaling["rope_type"] = "yarn"
    return _ROPE.read({**fields, _SCALING: scaling or None})


def _derived() -> FieldTransform:
    base, wide = _deepseek.DERIVED_SIZES, "q_head_dim"

    def read(fields: Mapping[str, Any]) -> dict[str, Any]:
        # The width of a cached row, in the files of the releases.
        cached = fields["kv_lora_rank"] + fields["qk_rope_head_dim"]
        head_dim = fields["head_dim"]
        own = {
            "head_dim": None if head_dim == cached else head_dim,
            "qk_head_dim": fields["qk_head_dim"] or fields[wide],
        }
        return base.read({**fields, **own})

    names = (*base.names, wide)
    return FieldTransform(names, read, base.write, {**base.defaults, wide: None})


FAMILY = dataclasses.replace(
    deepseek_v3.FAMILY,
    model_type="sarvam_mla",
    architecture="SarvamMLAForCausalLM",
    also_architectures=("DeepseekV3ForCausalLM",),  # what transformers makes of it
    also_named=(),
    fields={
        **deepseek_v3.FAMILY.fields,
        **moe(
            num_experts=("n_routed_experts", 128),
            n_group=("n_group", 1),
            topk_group=("topk_group", 1),
        ),
        "num_key_value_heads": Field(None),
        "initializer_range": Field(0.006),
        "q_lora_rank": Field(None, "mla.q_lora_rank"),
    },
    transforms=(
        dataclasses.replace(_ROPE, read=_read_rope),
        first_dense(1),
        _deepseek.shared_experts(1),
        _derived(),
    ),
    passthrough={**deepseek_v3.FAMILY.passthrough, _deepseek.FURTHER: 0},
    aliases={
        **deepseek_v3.FAMILY.aliases,
        "num_shared_experts": "n_shared_experts",
    },
)
