"""GLM-5: DeepSeek-V3.2 in other sizes, where layers may share an indexer.

Source: transformers `configuration_glm_moe_dsa.py`, `modeling_glm_moe_dsa.py`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from bridge.families import _deepseek, deepseek_v32
from bridge.families._family import Field
from bridge.families._field_transform import FieldTransform
from bridge.families._fields import moe
from bridge.families._hf_rope import rope
from bridge.families._layer_types import first_dense_or_by_type
from bridge.models import DecoderConfig

_TYPES, _OWN, _SHARED = "indexer_types", "full", "shared"
_DEFAULTS = {
    _TYPES: None,
    "index_topk_pattern": None,
    "index_topk_freq": 1,
    "index_skip_topk_offset": 2,
}


def _read_types(fields: Mapping[str, Any]) -> dict[str, Any]:
    count, types = fields["num_hidden_layers"], fields[_TYPES]
    pattern = fields["index_topk_pattern"]
    if types is None and isinstance(pattern, str):
        types = [{"F": _OWN, "S": _SHARED}.get(letter, letter) for letter in pattern]
    elif types is None and pattern is not None:
        types = pattern
    elif types is None:
        every = max(fields["index_topk_freq"], 1)
        first = fields["index_skip_topk_offset"] - 1
        owns = [max(layer - first, 0) % every == 0 for layer in range(count)]
        types = [_OWN if own else _SHARED for own in owns]
    if len(types) != count or set(types) - {_OWN, _SHARED}:
        raise ValueError(
            f"{_TYPES} = {types!r}: {_OWN!r} or {_SHARED!r} for each of the {count} "
            "layers"
        )
    shared = tuple(i for i, kind in enumerate(types) if kind == _SHARED)
    return {"shared_indexer_layers": shared}


def _write_types(config: DecoderConfig) -> dict[str, Any]:
    shared, layers = config.shared_indexer_layers, range(config.num_hidden_layers)
    return {_TYPES: [_SHARED if i in shared else _OWN for i in layers]}


INDEXER_TYPES = FieldTransform(tuple(_DEFAULTS), _read_types, _write_types, _DEFAULTS)
"""Which layers have an indexer, and which attend to the keys that the last selected."""

FAMILY = dataclasses.replace(
    deepseek_v32.FAMILY,
    model_type="glm_moe_dsa",
    architecture="GlmMoeDsaForCausalLM",
    fields={
        **deepseek_v32.FAMILY.fields,
        **moe(n_group=("n_group", 1), topk_group=("topk_group", 1)),
        "num_key_value_heads": Field(64),
        "max_position_embeddings": Field(202752),
        "rms_norm_eps": Field(1e-5, "norm_eps"),
        "q_lora_rank": Field(2048, "mla.q_lora_rank"),
        "qk_nope_head_dim": Field(192, "mla.qk_nope_head_dim"),
        "v_head_dim": Field(256, "mla.v_head_dim"),
        "index_n_heads": Field(32, "indexer.num_heads"),
    },
    transforms=(
        rope(interleaved=True),
        first_dense_or_by_type(3),
        _deepseek.shared_experts(1),
        deepseek_v32.TYPES,
        INDEXER_TYPES,
    ),
    constants={**deepseek_v32.FAMILY.constants, "indexer.interleaved": True},
    fixed={**deepseek_v32.FAMILY.fixed, "indexer_rope_interleave": True},
)
