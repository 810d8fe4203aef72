"""Parts shared by Gemma 2 and 3.

Norms before and after attention and MLP, their scales stored less one; embeddings
multiplied by the root of their width.
"""

from bridge.families._blocks import Rules, attention, mlp, norms
from bridge.families._family import Field
from bridge.families._fields import SIZES, attention_bias, tokens
from bridge.models import DecoderConfig, LayerKind

FIELDS = {
    **SIZES,
    **tokens(2, 1, 0),
    **attention_bias(),
    "num_key_value_heads": Field(4),
    "head_dim": Field(256),
    "tie_word_embeddings": Field(True),
    "rms_norm_eps": Field(1e-6, "norm_eps"),
    "query_pre_attn_scalar": Field(256),
    "sliding_window": Field(4096),
}
CONSTANTS = {
    "norm": "rms_zero_centered",
    "norm_placement": "both",
    "hidden_act": "gelu_pytorch_tanh",
    "scale_embeddings": True,
}
FIXED = {
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_dropout": 0.0,
    "use_bidirectional_attention": False,
}
# Old files have a field of an activation that the models never had.
PASSTHROUGH = {"hidden_act": "gelu_pytorch_tanh"}
NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
"""Norms of a layer, by their names in files."""


def layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    """A layer with its four norms."""
    del kind
    return attention(config) + mlp(config) + norms({name: name for name in NORMS})
