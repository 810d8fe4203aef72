"""Ling and Ring 2.0: GLM-4.5 with q, k and v in one tensor.

Source: inclusionAI/Ling-mini-2.0 `configuration_bailing_moe_v2.py`,
`modeling_bailing_moe_v2.py`.
"""

import dataclasses
from typing import Any

from bridge.families import _deepseek, glm4_moe, sarvam_moe
from bridge.families._family import REQUIRED, Field
from bridge.families._fields import qk_norm_switch
from bridge.families._hf_rope import rope
from bridge.families._layer_types import first_dense
from bridge.families.releases._read import Fields, reads, said

# The code's defaults are of no release.
_NEEDED = (
    *("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"),
    *("n_group", "topk_group", "routed_scaling_factor", "num_key_value_heads"),
    "max_position_embeddings",
)
_SHARED = "moe_shared_expert_intermediate_size"


def _check_derived(fields: Fields) -> dict[str, Any]:
    """Refuses what a file says twice, and differently."""
    head_dim = (
        fields["head_dim"] or fields["hidden_size"] // fields["num_attention_heads"]
    )
    derived = {
        _SHARED: fields["moe_intermediate_size"],
        "rotary_dim": int(head_dim * fields["partial_rotary_factor"]),
    }
    wrong = [name for name, v in derived.items() if fields[name] not in (None, v)]
    if wrong:
        lines = (f"{n} = {fields[n]}: only {derived[n]} is modelled" for n in wrong)
        raise ValueError("\n".join(lines))
    return {}


FAMILY = dataclasses.replace(
    glm4_moe.FAMILY,
    also_named=(),
    model_type="bailing_moe_v2",
    architecture="BailingMoeV2ForCausalLM",
    written_as=glm4_moe.FAMILY.model_type,
    fields={
        **glm4_moe.FAMILY.fields,
        **{
            name: dataclasses.replace(glm4_moe.FAMILY.fields[name], default=REQUIRED)
            for name in _NEEDED
        },
        "attention_bias": Field(False, aliases=("use_qkv_bias",)),
    },
    transforms=(
        rope(partial=0.5),
        first_dense(0),
        _deepseek.shared_experts(None),
        qk_norm_switch("use_qk_norm", "head"),
        reads(_check_derived, {_SHARED: None, "rotary_dim": None}),
        said(use_bias=False, moe_router_enable_expert_bias=True),
    ),
    fixed={
        **glm4_moe.FAMILY.fixed,
        "embedding_dropout": 0.0,
        "output_dropout": 0.0,
        "norm_head": False,
        "norm_softmax": False,
        "score_function": "sigmoid",
        "use_rmsnorm": True,
        "use_sliding_window": False,
        "using_split_qkv_in_self_attention": False,
    },
    aliases={**glm4_moe.FAMILY.aliases, "num_shared_experts": "n_shared_experts"},
    unread=frozenset(
        """
        max_window_layers mtp_loss_scaling_factor router_dtype router_type
        sliding_window
        """.split()
    ),
    key_mappings=sarvam_moe.FAMILY.key_mappings[:1],
)
