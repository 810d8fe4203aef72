"""DeepSeek-V3.2: V3 whose attention is sparse, to keys that an indexer selects.

Rows of at most `index_topk` tokens attend to all of their keys.

Source: transformers `configuration_deepseek_v32.py`, `modeling_deepseek_v32.py`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from bridge.families import _deepseek, deepseek_v3
from bridge.families._blocks import Rules, latent_attention, linear
from bridge.families._family import Field
from bridge.families._field_transform import FieldTransform
from bridge.families._hf_rope import rope
from bridge.families._layer_types import first_dense_or_by_type
from bridge.families._sparse import key_mappings_by_kind
from bridge.models import DecoderConfig, LayerKind
from bridge.rules._rules import Rule

INDEXER: Mapping[str, Field] = {
    "index_n_heads": Field(64, "indexer.num_heads"),
    "index_head_dim": Field(128, "indexer.head_dim"),
    "index_topk": Field(2048, "indexer.num_selected"),
}
"""Sizes of the indexer."""

_AT = "self_attn.indexer."
_KEY_NORM = "index_dim -> index_dim"
_RULES = (
    *linear(
        _AT + "wq_b",
        _AT + "q_proj",
        "(index_heads index_dim) q_rank -> q_rank index_heads index_dim",
    ),
    *linear(_AT + "wk", _AT + "k_proj", "index_dim embed -> embed index_dim"),
    Rule(_AT + "k_norm.weight", _AT + "k_norm.scale", _KEY_NORM),
    Rule(_AT + "k_norm.bias", _AT + "k_norm.bias", _KEY_NORM),
    *linear(
        _AT + "weights_proj",
        _AT + "weights_proj",
        "index_heads embed -> embed index_heads",
    ),
)


def attend(config: DecoderConfig, kind: LayerKind) -> Rules:
    """Latent attention, with the indexer that some layers have."""
    return latent_attention(config) + (_RULES if kind.indexes else ())


_TYPES = "layer_types"
_INDEXED = {"indexed_attention", "deepseek_sparse_attention"}


def _read_types(fields: Mapping[str, Any]) -> dict[str, Any]:
    types, rotated = fields[_TYPES], fields["qk_rope_head_dim"]
    width = rotated + fields["qk_nope_head_dim"]
    wrong = []
    count = fields["num_hidden_layers"]
    if types is not None and (len(types) != count or set(types) - _INDEXED):
        wrong.append(f"{_TYPES} = {types!r}: one of {sorted(_INDEXED)} for each layer")
    if fields.get("qk_head_dim") not in (None, width):
        wrong.append(
            f"qk_head_dim = {fields['qk_head_dim']!r}: the other sizes say {width}"
        )
    if wrong:
        raise ValueError("\n".join(wrong))
    return {}


# transformers overwrites `head_dim` by the rotary part of a head, whatever a file says.
TYPES = FieldTransform(
    (_TYPES, "head_dim", "qk_head_dim"),
    _read_types,
    lambda _: {},
    {_TYPES: None, "head_dim": 64, "qk_head_dim": None},
)
"""Fields that say what all files of the family have, or what transformers derives."""


FAMILY = dataclasses.replace(
    deepseek_v3.FAMILY,
    model_type="deepseek_v32",
    architecture="DeepseekV32ForCausalLM",
    also_named=(),
    fields={
        **deepseek_v3.FAMILY.fields,
        **INDEXER,
        "max_position_embeddings": Field(163840),
    },
    transforms=(
        rope(interleaved=True),
        first_dense_or_by_type(3),
        _deepseek.shared_experts(1),
        TYPES,
    ),
    fixed={
        **deepseek_v3.FAMILY.fixed,
        "mlp_bias": False,
        "rope_interleave": True,
    },
    key_mappings=key_mappings_by_kind(attend, _deepseek.corrected_and_shared),
)
