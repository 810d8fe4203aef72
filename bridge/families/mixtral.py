"""Mixtral: every layer sparse, the chosen experts' weights renormalised.

Source: transformers `configuration_mixtral.py`, `modeling_mixtral.py`.
"""

from collections.abc import Callable

from bridge.families._blocks import (
    FUSED_EXPERTS,
    PRE_NORMS,
    Rules,
    attention,
    experts,
    ignore_tied_head,
    key_mapping,
    norms,
    router,
)
from bridge.families._family import Family, Field
from bridge.families._fields import EXPERT_TRAINING, SIZES, moe, tokens
from bridge.families._hf_rope import rope
from bridge.families._layer_types import window_of_all
from bridge.models import DecoderConfig

_AT = "block_sparse_moe."
SPLIT = router(_AT + "gate") + experts(
    _AT + "experts.{expert}.", gate="w1", up="w3", down="w2"
)
FUSED = router() + FUSED_EXPERTS


def _layer(inner: Rules) -> Callable[[DecoderConfig, bool], Rules]:
    return lambda config, _: attention(config) + inner + norms(PRE_NORMS)


FAMILY = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    fields={
        **SIZES,
        **tokens(1, 2),
        **moe(
            num_experts=("num_local_experts", 8),
            num_experts_per_tok=("num_experts_per_tok", 2),
        ),
        "intermediate_size": Field(
            14336, ("intermediate_size", "moe.intermediate_size")
        ),
        "num_key_value_heads": Field(8),
        "max_position_embeddings": Field(4096 * 32),
        "rms_norm_eps": Field(1e-5, "norm_eps"),
    },
    transforms=(rope(1e6), window_of_all()),
    constants={"moe.norm_topk_prob": True},
    fixed={"hidden_act": "silu", "attention_dropout": 0.0},
    # Noise on what enters the router, in training alone.
    passthrough={**EXPERT_TRAINING, "router_jitter_noise": 0.0},
    key_mappings=(key_mapping(_layer(SPLIT)), key_mapping(_layer(FUSED))),
    ignore=ignore_tied_head,
)
