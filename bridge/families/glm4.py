"""GLM-4 (0414): norms before and after, half of a head rotary, interleaved pairs.

Source: transformers `configuration_glm4.py`, `modeling_glm4.py`.
"""

from bridge.families._blocks import (
    Rules,
    attention,
    fused_gate_up,
    ignore_tied_head,
    key_mapping,
    norms,
)
from bridge.families._family import Family, Field
from bridge.families._fields import SIZES, attention_bias, tokens
from bridge.families._hf_rope import rope
from bridge.models import DecoderConfig, LayerKind

_NORMS = {
    "input_layernorm": "input_layernorm",
    "post_self_attn_layernorm": "post_attention_layernorm",
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}


def _layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    del kind
    return attention(config) + fused_gate_up(config) + norms(_NORMS)


FAMILY = Family(
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    # Text parts of GLM-4.1V and GLM-4.6V-Flash, and of GLM-OCR.
    also_named=("glm4v_text", "glm_ocr_text"),
    fields={
        **SIZES,
        **tokens(None, (151329, 151336, 151338), 151329),
        **attention_bias(True, out=False),
        "num_key_value_heads": Field(2),
        "head_dim": Field(128),
        "max_position_embeddings": Field(131072),
        "rms_norm_eps": Field(1.5625e-07, "norm_eps"),
    },
    transforms=(rope(partial=0.5, interleaved=True),),
    constants={"norm_placement": "both"},
    fixed={"hidden_act": "silu", "attention_dropout": 0.0},
    key_mappings=(key_mapping(_layer),),
    ignore=ignore_tied_head,
)
