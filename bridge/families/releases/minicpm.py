"""MiniCPM 1B and 2B, and 4: Granite whose multipliers follow from other fields.

Source: openbmb/MiniCPM-2B-sft-bf16 `configuration_minicpm.py`, `modeling_minicpm.py`.
"""

import dataclasses
from typing import Any

from bridge.families import granite
from bridge.families._hf_rope import rope
from bridge.families.releases._read import Fields, reads, without

_MULTIPLIERS = (
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "logits_scaling",
)


def _read_multipliers(fields: Fields) -> dict[str, Any]:
    width, heads = fields["hidden_size"], fields["num_attention_heads"]
    head_dim = fields["head_dim"] or width // heads
    return {
        "embedding_multiplier": fields["scale_emb"],
        "residual_multiplier": fields["scale_depth"]
        / fields["num_hidden_layers"] ** 0.5,
        "attention_multiplier": head_dim**-0.5,
        "logits_scaling": width / fields["dim_model_base"],
    }


FAMILY = dataclasses.replace(
    granite.FAMILY,
    also_named=(),
    model_type="minicpm",
    architecture="MiniCPMForCausalLM",
    written_as=granite.FAMILY.model_type,
    fields=without(granite.FAMILY.fields, *_MULTIPLIERS),
    transforms=(
        rope(),
        reads(
            _read_multipliers,
            {"scale_emb": 1, "scale_depth": 1, "dim_model_base": 1},
        ),
    ),
    # Experts, and the attention of MiniCPM 4 to some keys, are not modelled.
    fixed={**granite.FAMILY.fixed, "num_experts": 0, "sparse_config": None},
    # Of weights before training.
    unread=frozenset({"mup_denominator"}),
)
