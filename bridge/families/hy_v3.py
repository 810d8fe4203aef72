"""Hunyuan 3: norms of each head, and a sigmoid router with a correction bias.

Source: transformers `configuration_hy_v3.py`, `modeling_hy_v3.py`, and
`conversion_mapping.py` for the names of the releases.
"""

from collections.abc import Callable

from bridge.families import _deepseek
from bridge.families._blocks import (
    FUSED_EXPERTS,
    PRE_NORMS,
    Rules,
    attention,
    experts,
    key_mapping,
    mlp,
    norms,
    router,
)
from bridge.families._family import Family, Field
from bridge.families._fields import SIZES, attention_bias, moe, tokens
from bridge.families._hf_rope import rope
from bridge.families._layer_types import DENSE_BY_TYPE
from bridge.models import DecoderConfig, LayerKind
from bridge.rules._rules import Rule


def _layer(
    run: Rules, gate: str, bias: str, shared: str
) -> Callable[[DecoderConfig, LayerKind], Rules]:
    beside = Rule(bias, "mlp.router.correction_bias", "experts -> experts")

    def rules(config: DecoderConfig, kind: LayerKind) -> Rules:
        inner = mlp(config)
        if kind.channels == "sparse":
            of_all = mlp(config, shared, "mlp.shared_expert.", "shared_mlp")
            inner = router(gate) + run + (beside, *of_all)
        return attention(config) + inner + norms(PRE_NORMS)

    return rules


_RELEASES = ("mlp.router.gate", "mlp.expert_bias", "mlp.shared_mlp.")
_IN_MEMORY = ("mlp.gate", "mlp.e_score_correction_bias", "mlp.shared_experts.")

FAMILY = Family(
    model_type="hy_v3",
    architecture="HYV3ForCausalLM",
    fields={
        **SIZES,
        **tokens(None, None),
        **attention_bias(),
        **moe(
            num_experts=("num_experts", 192),
            num_experts_per_tok=("num_experts_per_tok", 8),
            routed_scaling_factor=("router_scaling_factor", 2.826),
        ),
        "moe_intermediate_size": Field(
            1536, "moe.intermediate_size", ("expert_hidden_dim",)
        ),
        "num_key_value_heads": Field(8),
        "head_dim": Field(128),
        "max_position_embeddings": Field(131072),
        "initializer_range": Field(0.006),
        "rms_norm_eps": Field(1e-5, "norm_eps"),
    },
    transforms=(
        rope(11158840.0),
        DENSE_BY_TYPE,
        _deepseek.shared_experts(1, "num_shared_experts"),
    ),
    constants={
        "qk_norm": "head",
        "moe.scoring": "sigmoid",
        "moe.norm_topk_prob": True,
        "moe.correction_bias": True,
        "moe.float32_logits": True,
    },
    fixed={"hidden_act": "silu", "attention_dropout": 0.0, "mlp_bias": False},
    # Whether a sum of two is rounded once; it is, either way.
    passthrough={
        "output_router_logits": False,
        "enable_moe_fp32_combine": True,
        _deepseek.FURTHER: 0,
    },
    left_out={_deepseek.FURTHER: 0},
    # Of published files: what the model has always, or has no part in.
    inert={
        "first_k_dense_replace": 1,
        "qk_norm": True,
        "route_norm": True,
        "moe_router_use_sigmoid": True,
        "moe_router_enable_expert_bias": True,
        "enable_lm_head_fp32": True,
        "enable_attention_fp32_softmax": False,
        "use_grouped_mm": False,
    },
    key_mappings=(
        key_mapping(_layer(experts(), *_RELEASES)),
        key_mapping(_layer(FUSED_EXPERTS, *_IN_MEMORY)),
    ),
    ignore=_deepseek.ignore_further,
)
