"""Kolibri 1: attention of EXAONE 4 between two norms, and experts in each layer.

The bias of the router is added to logits, not to scores.

Source: transformers `configuration_kolibri1.py`, `modeling_kolibri1.py`.
"""

from collections.abc import Callable

from bridge.families import _deepseek
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
from bridge.families._family import Family, Field
from bridge.families._fields import SIZES, moe, tokens
from bridge.families._hf_rope import rope
from bridge.families._layer_types import turned_where_sliding
from bridge.models import DecoderConfig, LayerKind
from bridge.rules._rules import Rule

_BIAS = "mlp.router.correction_bias"


def _layer(
    run: Rules, bias: str, after_attention: str, after_mlp: str
) -> Callable[[DecoderConfig, LayerKind], Rules]:
    """Returns the rules of a layer.

    Args:
      run: Rules of the experts.
      bias: Name of the router's bias.
      after_attention: Name of the norm behind attention.
      after_mlp: Name of the norm behind experts.
    """
    names = {
        "input_layernorm": "input_layernorm",
        after_attention: "post_attention_layernorm",
        "post_attention_layernorm": "pre_feedforward_layernorm",
        after_mlp: "post_feedforward_layernorm",
    }
    inner = (*router(), Rule(bias, _BIAS, "experts -> experts"), *run)
    outer = norms(names)
    return lambda config, _: (
        attention(config) + inner + _deepseek.shared(config) + outer
    )


# Files have names of their own, and experts one by one.
_IN_FILES = "moe.router.expert_bias", "post_attn_norm", "post_ffn_norm"
_IN_MEMORY = (
    "mlp.gate.e_score_correction_bias",
    "post_self_attn_layernorm",
    "post_mlp_layernorm",
)

FAMILY = Family(
    model_type="kolibri1",
    architecture="Kolibri1ForCausalLM",
    fields={
        **{name: field for name, field in SIZES.items() if name != "intermediate_size"},
        **tokens(None, None),
        **moe(
            num_experts=("num_experts", 384),
            num_experts_per_tok=("num_experts_per_tok", 6),
            norm_topk_prob=("norm_topk_prob", False),
            shared_intermediate_size=("shared_expert_intermediate_size", 512),
        ),
        # No layer is dense: no other width is said.
        "moe_intermediate_size": Field(
            512, ("intermediate_size", "moe.intermediate_size")
        ),
        "num_key_value_heads": Field(4),
        "head_dim": Field(128),
        "max_position_embeddings": Field(262144),
        "rms_norm_eps": Field(1e-6, "norm_eps"),
    },
    transforms=(rope(), turned_where_sliding(5, window=513, pattern_field=None)),
    constants={
        "norm_placement": "both",
        "qk_norm": "head",
        "moe.scoring": "sigmoid",
        "moe.norm_topk_eps": 0.0,
        "moe.correction_bias": True,
        "moe.corrected_logits": True,
        "moe.float32_logits": True,
    },
    fixed={"hidden_act": "silu", "attention_dropout": 0.0},
    passthrough={"output_router_logits": False},
    key_mappings=(
        key_mapping(_layer(experts(), *_IN_FILES)),
        key_mapping(_layer(FUSED_EXPERTS, *_IN_MEMORY)),
    ),
    ignore=ignore_tied_head,
)
