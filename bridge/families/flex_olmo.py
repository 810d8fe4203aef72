"""FlexOlmo: OLMo 2 with experts, whose weights are not renormalised.

Source: transformers `configuration_flex_olmo.py`, `modeling_flex_olmo.py`.
"""

from bridge.families import _olmo
from bridge.families._blocks import (
    FUSED_EXPERTS,
    Rules,
    attention,
    experts,
    ignore_tied_head,
    key_mapping,
    norms,
    router,
)
from bridge.families._family import Family, Field, KeyMapping
from bridge.families._fields import EXPERT_TRAINING, moe, tokens
from bridge.families._hf_rope import rope
from bridge.models import DecoderConfig, LayerKind


def _names(run: Rules) -> KeyMapping:
    def layer(config: DecoderConfig, kind: LayerKind) -> Rules:
        del kind
        inner = router() + run
        return attention(config) + inner + norms({n: n for n in _olmo.NORMS})

    return key_mapping(layer)


FAMILY = Family(
    model_type="flex_olmo",
    architecture="FlexOlmoForCausalLM",
    fields={
        **_olmo.FIELDS,
        **tokens(None, 100257, 100277),
        **moe(
            num_experts=("num_experts", 7),
            num_experts_per_tok=("num_experts_per_tok", 5),
            norm_topk_prob=("norm_topk_prob", False),
        ),
        # All layers are sparse, so this is the width of an expert.
        "intermediate_size": Field(
            11008, ("intermediate_size", "moe.intermediate_size")
        ),
        "max_position_embeddings": Field(4096),
        "rms_norm_eps": Field(1e-6, "norm_eps"),
    },
    transforms=(rope(500000.0),),
    constants={**_olmo.CONSTANTS, "moe.rounded_weights": True},
    fixed=_olmo.FIXED,
    passthrough={**EXPERT_TRAINING, "router_aux_loss_coef": 0.01},
    key_mappings=(_names(experts()), _names(FUSED_EXPERTS)),
    ignore=ignore_tied_head,
)
