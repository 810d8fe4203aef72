"""Parts shared by OLMo 2 and 3: norms after attention and MLP, and of all heads."""

from bridge.families._blocks import Rules, attention, mlp, norms
from bridge.families._family import Field
from bridge.families._fields import SIZES, attention_bias, tokens
from bridge.models import DecoderConfig, LayerKind

FIELDS = {
    **SIZES,
    **tokens(None, 50279, 1),
    **attention_bias(),
    "max_position_embeddings": Field(2048),
    "rms_norm_eps": Field(1e-5, "norm_eps"),
}
CONSTANTS = {"norm": "rms_wide", "norm_placement": "post", "qk_norm": "full"}
FIXED = {"hidden_act": "silu", "attention_dropout": 0.0}
NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")
"""Norms of a layer, by their names in files."""


def layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    """A layer with its two norms."""
    del kind
    return attention(config) + mlp(config) + norms({name: name for name in NORMS})
