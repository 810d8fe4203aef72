"""Qwen3.5 with experts, text part: Qwen3.5's mixers, every layer sparse.

Source: transformers `configuration_qwen3_5_moe.py`, `modeling_qwen3_5_moe.py`.
"""

import dataclasses

from bridge.families import qwen3_5
from bridge.families._family import Field
from bridge.families._field_transform import FieldTransform
from bridge.families._fields import EXPERT_TRAINING, moe
from bridge.families._sparse import gated_shared, key_mappings_by_kind

_BASE = qwen3_5.FAMILY
_EXPERT_WIDTH = "moe_intermediate_size"

# No layer is dense: the file has no width of an MLP.
_WIDTH = FieldTransform(
    (),
    lambda fields: {"intermediate_size": fields[_EXPERT_WIDTH]},
    lambda config: {},
)

FAMILY = dataclasses.replace(
    _BASE,
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    fields={
        **{n: f for n, f in _BASE.fields.items() if n != "intermediate_size"},
        **moe(
            num_experts=("num_experts", 256),
            num_experts_per_tok=("num_experts_per_tok", 8),
            intermediate_size=(_EXPERT_WIDTH, 512),
            shared_intermediate_size=("shared_expert_intermediate_size", 512),
        ),
        "num_key_value_heads": Field(2),
    },
    transforms=(*_BASE.transforms, _WIDTH),
    constants={
        **_BASE.constants,
        "moe.norm_topk_prob": True,
        "moe.rounded_weights": True,
        "moe.shared_gate": True,
    },
    passthrough=EXPERT_TRAINING,
    key_mappings=key_mappings_by_kind(qwen3_5.mixer, gated_shared),
)
