"""AFMoE (Trinity): four norms a layer, gated attention, full layers without a rope.

Source: transformers `configuration_afmoe.py`, `modeling_afmoe.py`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from bridge.families import _deepseek
from bridge.families._blocks import (
    FUSED_EXPERTS,
    Rules,
    attention,
    experts,
    ignore_tied_head,
    key_mapping,
    linear,
    mlp,
    norms,
    router,
)
from bridge.families._family import Family, Field
from bridge.families._fields import SIZES, attention_bias, moe, tokens
from bridge.families._hf_rope import rope
from bridge.families._layer_types import (
    FULL,
    SLIDING,
    first_dense,
    interval,
    sliding_or_full_without_rope,
)
from bridge.models import DecoderConfig, LayerKind
from bridge.rules._rules import Rule

_NORMS = {
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "post_attention_layernorm",
    "pre_mlp_layernorm": "pre_feedforward_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}
_GATE = linear(
    "self_attn.gate_proj",
    "self_attn.q_gate",
    "(heads head_dim) embed -> embed heads head_dim",
)
_CORRECTION = Rule(
    "mlp.expert_bias", "mlp.router.correction_bias", "experts -> experts"
)


def _layer(run: Rules) -> Callable[[DecoderConfig, LayerKind], Rules]:
    def rules(config: DecoderConfig, kind: LayerKind) -> Rules:
        inner = mlp(config)
        if kind.channels == "sparse":
            beside = (_CORRECTION, *_deepseek.shared(config))
            inner = router("mlp.router.gate") + run + beside
        return attention(config) + _GATE + inner + norms(_NORMS)

    return rules


_EVERY = "global_attn_every_n_layers"


def _read_every(fields: Mapping[str, Any]) -> list[str]:
    every = interval(fields, _EVERY)
    layers = range(fields["num_hidden_layers"])
    return [SLIDING if (layer + 1) % every else FULL for layer in layers]


FAMILY = Family(
    model_type="afmoe",
    architecture="AfmoeForCausalLM",
    fields={
        **SIZES,
        **tokens(None, None),
        **attention_bias(),
        **moe(
            num_experts=("num_experts", 64),
            num_experts_per_tok=("num_experts_per_tok", 6),
            intermediate_size=("moe_intermediate_size", 1408),
            routed_scaling_factor=("route_scale", 1.0),
        ),
        "head_dim": Field(128),
        "max_position_embeddings": Field(16384),
        "rms_norm_eps": Field(1e-5, "norm_eps"),
        "sliding_window": Field(1024),
        "mup_enabled": Field(False, "scale_embeddings"),
    },
    transforms=(
        rope(),
        sliding_or_full_without_rope(_read_every, {_EVERY: 4}),
        first_dense(1, "num_dense_layers"),
        _deepseek.shared_experts(2, "num_shared_experts"),
    ),
    constants={
        "norm": "rms_wide",
        "norm_placement": "both",
        "qk_norm": "head",
        "attention_gate": True,
        "moe.scoring": "sigmoid",
        "moe.norm_topk_prob": True,
        "moe.correction_bias": True,
    },
    fixed={"hidden_act": "silu", "attention_dropout": 0.0},
    passthrough={"output_router_logits": False, "load_balance_coeff": None},
    # Of published files: what the model has always.
    inert={
        "score_func": "sigmoid",
        "route_norm": True,
        "n_group": 1,
        "topk_group": 1,
        "num_expert_groups": 1,
        "num_limited_groups": 1,
        "use_grouped_mm": True,
    },
    key_mappings=(key_mapping(_layer(experts())), key_mapping(_layer(FUSED_EXPERTS))),
    ignore=ignore_tied_head,
)
