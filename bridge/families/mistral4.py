"""Mistral Small 4: DeepSeek-V3 with a softmax router, whose queries grow.

Queries grow with their position, by `llama_4_scaling_beta` of the rope.

Source: transformers `configuration_mistral4.py`, `modeling_mistral4.py`.
"""

from collections.abc import Mapping
from typing import Any

from bridge.families import _deepseek, _growing_queries
from bridge.families._blocks import ignore_tied_head, latent_attention
from bridge.families._family import Family, Field
from bridge.families._field_transform import FieldTransform
from bridge.families._fields import moe, tokens
from bridge.families._hf_rope import rope
from bridge.families._layer_types import first_dense
from bridge.families._sparse import key_mappings
from bridge.models import DecoderConfig

_ABSENT = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    _growing_queries.BETA: 0.1,
}
_ROPE = _growing_queries.rope_with_beta(
    rope(interleaved=True, interleave_field="rope_interleave"), _ABSENT
)
_PARTIAL, _LENGTH = "partial_rotary_factor", "max_position_embeddings"


def _read_rope(fields: Mapping[str, Any]) -> dict[str, Any]:
    turned = fields["qk_rope_head_dim"]
    part = turned / (turned + fields["qk_nope_head_dim"])
    plain = {}
    for name in _growing_queries.ROPES:
        given = fields.get(name)
        if isinstance(given, Mapping):
            if given.get(_PARTIAL) not in (None, part):
                raise ValueError(
                    f"{_PARTIAL} = {given[_PARTIAL]!r}: qk_rope_head_dim and "
                    f"qk_nope_head_dim say {part}"
                )
            # The length of the longest text is said beside the rope as well.
            unread = (_PARTIAL, _LENGTH)
            plain[name] = {k: v for k, v in given.items() if k not in unread}
    beside = fields[_PARTIAL]
    if beside not in (None, 1, part):
        raise ValueError(f"{_PARTIAL} = {beside!r}: the sizes of heads say {part}")
    return _ROPE.read({**fields, **plain, _PARTIAL: None})


def _write_rope(config: DecoderConfig) -> dict[str, Any]:
    written, mla = _ROPE.write(config), config.mla
    assert mla is not None
    part = {_PARTIAL: mla.qk_rope_head_dim / mla.qk_head_dim}
    # transformers takes it for 1 where `rope_scaling` does not say.
    ropes = {name: written[name] for name in _growing_queries.ROPES}
    return {**written, **{name: {**r, **part} for name, r in ropes.items() if r}}


FAMILY = Family(
    model_type="mistral4",
    architecture="Mistral4ForCausalLM",
    fields={
        **_deepseek.FIELDS,
        **tokens(1, 2, 11),
        "num_key_value_heads": Field(32),
        "max_position_embeddings": Field(1048576),
        "kv_lora_rank": Field(256, "mla.kv_lora_rank"),
        "q_lora_rank": Field(1024, "mla.q_lora_rank"),
        "qk_nope_head_dim": Field(64, "mla.qk_nope_head_dim"),
        **moe(
            num_experts=("n_routed_experts", 128),
            num_experts_per_tok=("num_experts_per_tok", 4),
            intermediate_size=("moe_intermediate_size", 2048),
            norm_topk_prob=("norm_topk_prob", True),
            routed_scaling_factor=("routed_scaling_factor", 1.0),
            n_group=("n_group", 1),
            topk_group=("topk_group", 1),
        ),
    },
    transforms=(
        FieldTransform(_ROPE.names, _read_rope, _write_rope, _ROPE.defaults),
        first_dense(0),
        _deepseek.shared_experts(1),
        _deepseek.derived_sizes(whole=True),
    ),
    constants={"moe.group_scoring": "top2_sum"},
    fixed={"hidden_act": "silu", "attention_dropout": 0.0},
    passthrough={"output_router_logits": False, "pretraining_tp": 1},
    # Files have the experts of a layer as one tensor.
    key_mappings=key_mappings(latent_attention, _deepseek.shared)[::-1],
    ignore=ignore_tied_head,
)
