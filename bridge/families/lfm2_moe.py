"""LFM2 with experts, as LFM2-8B-A1B: its first layers are dense.

Source: transformers `configuration_lfm2_moe.py`, `modeling_lfm2_moe.py`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from bridge.families import lfm2
from bridge.families._blocks import Rules, experts, ignore_tied_head, outside, router
from bridge.families._family import Family, Field, KeyMapping, Layers
from bridge.families._fields import SIZES, moe, tokens
from bridge.families._hf_rope import rope
from bridge.families._layer_types import first_dense, mixer_types
from bridge.models import DecoderConfig, LayerKind
from bridge.rules._rules import Rule

_AT = "feed_forward."
_EXPERTS = experts(_AT + "experts.{expert}.", gate="w1", up="w3", down="w2")
_FUSED_EXPERTS = (
    Rule(
        _AT + "experts.gate_up_proj",
        "mlp.experts.gate_up_proj",
        "experts (two expert_mlp) embed -> experts embed two expert_mlp",
    ),
    Rule(
        _AT + "experts.down_proj",
        "mlp.experts.down_proj",
        "experts embed expert_mlp -> experts expert_mlp embed",
    ),
)
_BIAS = Rule(_AT + "expert_bias", "mlp.router.correction_bias", "experts -> experts")


def _layers(run: Rules) -> Layers:
    return Layers("model.layers.{layer}.", _layer(run))


def _layer(run: Rules) -> Callable[[DecoderConfig, LayerKind], Rules]:
    def rules(config: DecoderConfig, kind: LayerKind) -> Rules:
        if kind.channels != "sparse" or config.moe is None:
            return lfm2.layer(config, kind)
        bias = (_BIAS,) if config.moe.correction_bias else ()
        return lfm2.mixer(config, kind) + router(_AT + "gate") + run + bias

    return rules


def _no_types(fields: Mapping[str, Any]) -> list[str]:
    raise ValueError(
        f"layer_types is missing: conv or full_attention for each of the "
        f"{fields['num_hidden_layers']} layers"
    )


FAMILY = Family(
    model_type="lfm2_moe",
    architecture="Lfm2MoeForCausalLM",
    fields={
        **SIZES,
        **tokens(1, 2, 0),
        **moe(
            num_experts=("num_experts", 32),
            num_experts_per_tok=("num_experts_per_tok", 4),
            intermediate_size=("moe_intermediate_size", 1792),
            norm_topk_prob=("norm_topk_prob", True),
            routed_scaling_factor=("routed_scaling_factor", 1.0),
            correction_bias=("use_expert_bias", True),
        ),
        "num_key_value_heads": Field(8),
        "max_position_embeddings": Field(128000),
        "norm_eps": Field(1e-5),
        "tie_word_embeddings": Field(True, aliases=("tie_embedding",)),
        "conv_L_cache": Field(3, "short_conv.kernel_size"),
        "conv_bias": Field(False, "short_conv.bias"),
    },
    transforms=(
        rope(1000000.0),
        mixer_types({"conv": "short_conv"}, _no_types),
        first_dense(2, "num_dense_layers"),
    ),
    constants={
        "qk_norm": "head",
        "moe.scoring": "sigmoid",
        "moe.norm_topk_eps": 1e-6,
    },
    passthrough={"output_router_logits": False},
    key_mappings=tuple(
        KeyMapping(outside(norm="model.embedding_norm"), _layers(run))
        for run in (_EXPERTS, _FUSED_EXPERTS)
    ),
    ignore=ignore_tied_head,
)
