"""GPT-OSS: sinks, biases, every second layer slides, a clamped activation.

Experts are one tensor a layer, [in, out], gate and up column by column. Releases in
MXFP4 are decoded by the source.

Source: transformers `configuration_gpt_oss.py`, `modeling_gpt_oss.py`.
"""

from bridge.families._blocks import (
    PRE_NORMS,
    Rules,
    attention,
    ignore_tied_head,
    key_mapping,
    linear,
    norms,
)
from bridge.families._family import Family, Field
from bridge.families._fields import SIZES, attention_bias, moe, tokens
from bridge.families._hf_rope import rope
from bridge.families._layer_types import layer_types
from bridge.models import DecoderConfig, LayerKind
from bridge.rules._rules import Rule

_EXPERTS = "mlp.experts."


def _layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    del kind
    return (
        *attention(config),
        Rule("self_attn.sinks", "self_attn.sinks", "heads -> heads"),
        *linear(
            "mlp.router",
            "mlp.router.gate",
            "experts embed -> embed experts",
            "experts -> experts",
        ),
        Rule(
            _EXPERTS + "gate_up_proj",
            _EXPERTS + "gate_up_proj",
            "experts embed (expert_mlp two) -> experts embed two expert_mlp",
        ),
        Rule(
            _EXPERTS + "gate_up_proj_bias",
            _EXPERTS + "gate_up_bias",
            "experts (expert_mlp two) -> experts two expert_mlp",
        ),
        Rule(
            _EXPERTS + "down_proj",
            _EXPERTS + "down_proj",
            "experts expert_mlp embed -> experts expert_mlp embed",
        ),
        Rule(
            _EXPERTS + "down_proj_bias",
            _EXPERTS + "down_bias",
            "experts embed -> experts embed",
        ),
        *norms(PRE_NORMS),
    )


FAMILY = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    fields={
        **SIZES,
        **tokens(None, None),
        **attention_bias(True),
        **moe(
            num_experts=("num_local_experts", 128),
            num_experts_per_tok=("num_experts_per_tok", 4),
            swiglu_limit=("swiglu_limit", 7.0),
            swiglu_alpha=("swiglu_alpha", 1.702),
        ),
        "intermediate_size": Field(
            2880, ("intermediate_size", "moe.intermediate_size")
        ),
        "num_key_value_heads": Field(8),
        "head_dim": Field(64),
        "max_position_embeddings": Field(131072),
        "rms_norm_eps": Field(1e-5, "norm_eps"),
        "sliding_window": Field(128),
    },
    transforms=(
        rope(
            150000.0,
            absent={
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        ),
        layer_types(2),
    ),
    constants={
        "norm": "rms_wide",
        "attention_sinks": True,
        "moe.scoring": "softmax_of_chosen",
        "moe.router_bias": True,
        "moe.expert_bias": True,
    },
    fixed={"hidden_act": "silu", "attention_dropout": 0.0},
    passthrough={
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        # What the releases say besides, and transformers reads elsewhere or nowhere.
        "experts_per_token": None,
        "initial_context_length": None,
    },
    key_mappings=(key_mapping(_layer),),
    ignore=ignore_tied_head,
)
