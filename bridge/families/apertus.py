"""Apertus: an MLP without a gate, whose activation is learned, and norms of heads.

Source: transformers `configuration_apertus.py`, `modeling_apertus.py`.
"""

from bridge.families._blocks import (
    Rules,
    attention,
    ignore_tied_head,
    key_mapping,
    norms,
    ungated_mlp,
)
from bridge.families._family import Family, Field
from bridge.families._fields import SIZES, attention_bias, tokens
from bridge.families._hf_rope import rope
from bridge.models import DecoderConfig, LayerKind
from bridge.rules._rules import Rule

_NORMS = {
    "attention_layernorm": "input_layernorm",
    "feedforward_layernorm": "pre_feedforward_layernorm",
}
_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12e6,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def _layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    del kind
    rules = attention(config) + ungated_mlp(config) + norms(_NORMS)
    return rules + (_xielu() if config.hidden_act == "xielu" else ())


def _xielu() -> Rules:
    """The slopes of the activation, and constants that are stored beside them."""
    slopes, constants = ("alpha_p", "alpha_n"), ("beta", "eps")
    layouts = {**dict.fromkeys(slopes, "one -> one"), **dict.fromkeys(constants, "->")}
    return tuple(
        Rule(f"mlp.act_fn.{name}", f"mlp.xielu.{name}", layout)
        for name, layout in layouts.items()
    )


FAMILY = Family(
    model_type="apertus",
    architecture="ApertusForCausalLM",
    fields={
        **SIZES,
        **tokens(1, 2, 3),
        **attention_bias(),
        "max_position_embeddings": Field(65536),
        "rms_norm_eps": Field(1e-5, "norm_eps"),
        "hidden_act": Field("xielu"),
    },
    transforms=(rope(12e6, absent=_ROPE),),
    constants={"gated_mlp": False, "qk_norm": "head"},
    fixed={"attention_dropout": 0.0},
    key_mappings=(key_mapping(_layer),),
    ignore=ignore_tied_head,
)
