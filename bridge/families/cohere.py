"""Command R and Aya: attention and MLP side by side behind one norm.

Source: transformers `configuration_cohere.py`, `modeling_cohere.py`.
"""

from bridge.families._blocks import (
    Rules,
    attention,
    ignore_tied_head,
    key_mapping,
    mlp,
    norms,
)
from bridge.families._family import Family, Field
from bridge.families._fields import SIZES, attention_bias, qk_norm_switch, tokens
from bridge.families._hf_rope import rope
from bridge.models import DecoderConfig, LayerKind


def layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    """A layer with its one norm."""
    del kind
    own = norms({"input_layernorm": "input_layernorm"})
    return attention(config) + mlp(config) + own


FAMILY = Family(
    model_type="cohere",
    architecture="CohereForCausalLM",
    fields={
        **SIZES,
        **tokens(5, 255001, 0),
        **attention_bias(),
        "tie_word_embeddings": Field(True),
        "max_position_embeddings": Field(8192),
        "layer_norm_eps": Field(1e-5, "norm_eps"),
        "logit_scale": Field(0.0625),
    },
    transforms=(
        rope(500000.0, interleaved=True),
        qk_norm_switch("use_qk_norm", "per_head"),
    ),
    constants={"norm": "layer", "norm_placement": "parallel"},
    fixed={"hidden_act": "silu", "attention_dropout": 0.0},
    key_mappings=(key_mapping(layer),),
    ignore=ignore_tied_head,
)
