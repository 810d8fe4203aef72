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
from bridge.families._codec import Codec
from bridge.families._family import Family, Field
from bridge.families._fields import SIZES, attention_bias, tokens
from bridge.families._hf_rope import rope
from bridge.models import DecoderConfig


def _layer(config: DecoderConfig, sparse: bool) -> Rules:
    del sparse
    own = norms({"input_layernorm": "input_layernorm"})
    return attention(config) + mlp(config) + own


_QK_NORM = Codec(
    ("use_qk_norm",),
    lambda fields: {"qk_norm": "per_head" if fields["use_qk_norm"] else None},
    lambda config: {"use_qk_norm": config.qk_norm is not None},
    {"use_qk_norm": False},
)

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
    codecs=(rope(500000.0, interleaved=True), _QK_NORM),
    traits={"norm": "layer", "norm_placement": "parallel"},
    fixed={"hidden_act": "silu", "attention_dropout": 0.0},
    key_mappings=(key_mapping(_layer),),
    ignore=ignore_tied_head,
)
