"""Granite 3 with experts, and PowerMoE: Granite's multipliers, every layer sparse.

Source: transformers `configuration_granitemoe.py`, `modeling_granitemoe.py`.
"""

from bridge.families._blocks import (
    PRE_NORMS,
    Rules,
    attention,
    ignore_tied_head,
    key_mapping,
    norms,
    router,
)
from bridge.families._family import Family, Field
from bridge.families._fields import (
    EXPERT_TRAINING,
    SIZES,
    attention_bias,
    moe,
    tokens,
)
from bridge.families._hf_rope import rope
from bridge.models import DecoderConfig, LayerKind
from bridge.rules._rules import Rule

_AT = "block_sparse_moe."
EXPERTS: Rules = (
    *router(f"{_AT}router.layer"),
    Rule(
        f"{_AT}input_linear.weight",
        "mlp.experts.gate_up_proj",
        "experts (two expert_mlp) embed -> experts embed two expert_mlp",
    ),
    Rule(
        f"{_AT}output_linear.weight",
        "mlp.experts.down_proj",
        "experts embed expert_mlp -> experts expert_mlp embed",
    ),
)
"""Router and experts, all of which are one tensor each way."""


def layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    """A layer whose experts are one tensor each way."""
    del kind
    return attention(config) + EXPERTS + norms(PRE_NORMS)


FAMILY = Family(
    model_type="granitemoe",
    architecture="GraniteMoeForCausalLM",
    fields={
        **SIZES,
        **tokens(1, 2),
        **attention_bias(),
        **moe(
            num_experts=("num_local_experts", 8),
            num_experts_per_tok=("num_experts_per_tok", 2),
        ),
        # All layers are sparse, so this is the width of an expert.
        "intermediate_size": Field(
            11008, ("intermediate_size", "moe.intermediate_size")
        ),
        "max_position_embeddings": Field(2048),
        "rms_norm_eps": Field(1e-6, "norm_eps"),
        "embedding_multiplier": Field(1.0),
        "residual_multiplier": Field(1.0),
        "attention_multiplier": Field(1.0),
        "logits_scaling": Field(1.0),
    },
    transforms=(rope(),),
    # A softmax of the chosen logits is one of all, divided by the sum of the chosen.
    constants={"moe.norm_topk_prob": True, "moe.rounded_weights": True},
    fixed={"hidden_act": "silu"},
    passthrough={**EXPERT_TRAINING, "attention_dropout": 0.0},
    key_mappings=(key_mapping(layer),),
    ignore=ignore_tied_head,
)
