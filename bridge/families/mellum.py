"""Mellum 2: Qwen3-MoE of which layers slide or not, with a rope for each type.

The layer that predicts a further token is left out, as transformers leaves it out.

Source: transformers `configuration_mellum.py`, `modeling_mellum.py`.
"""

import dataclasses

from bridge.families import qwen3_moe
from bridge.families._family import Field
from bridge.families._fields import EXPERT_TRAINING, moe
from bridge.families._hf_rope import rope_by_layer_type
from bridge.families._layer_types import FULL, SPARSE_BY_TYPE, sliding_or_full

_FURTHER = "num_nextn_predict_layers"

FAMILY = dataclasses.replace(
    qwen3_moe.FAMILY,
    model_type="mellum",
    architecture="MellumForCausalLM",
    also_named=(),
    fields={
        **qwen3_moe.FAMILY.fields,
        **moe(
            num_experts=("num_experts", 64),
            num_experts_per_tok=("num_experts_per_tok", 8),
            intermediate_size=("moe_intermediate_size", 896),
            norm_topk_prob=("norm_topk_prob", True),
        ),
        "head_dim": Field(128),
        "max_position_embeddings": Field(131072),
        "sliding_window": Field(1024),
    },
    transforms=(
        rope_by_layer_type(
            500000.0,
            10000.0,
            default={"rope_type": "default", "rope_theta": 500000.0},
        ),
        sliding_or_full(lambda fields: [FULL] * fields["num_hidden_layers"]),
        SPARSE_BY_TYPE,
    ),
    passthrough={
        **EXPERT_TRAINING,
        _FURTHER: None,
        "mtp_layer_types": None,
        "mtp_mlp_layer_types": None,
    },
    aliases={"num_mtp_layers": _FURTHER},
    left_out={_FURTHER: None, "mtp_layer_types": None, "mtp_mlp_layer_types": None},
    # Of published files: layer_types say which layers slide.
    inert={"use_sliding_window": True, "max_window_layers": 0},
    key_mappings=qwen3_moe.FAMILY.key_mappings[:2],
)
