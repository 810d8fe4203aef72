"""Parts shared by Gemma 2, 3, 3n and 4.

Norms before and after attention and MLP, their scales stored less one; embeddings
multiplied by the root of their width.
"""

from bridge.families._blocks import (
    Rules,
    attention,
    ignore_tied_head,
    linear,
    mlp,
    norm,
    norms,
    outside,
)
from bridge.families._family import Field
from bridge.families._fields import SIZES, attention_bias, tokens
from bridge.models import DecoderConfig, LayerKind
from bridge.rules._rules import Rule

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


_KEY_VALUE = tuple(f"self_attn.{name}." for name in ("k_proj", "v_proj", "k_norm"))
LAYER_INPUT = (
    *linear(
        "per_layer_input_gate",
        "per_layer_input.gate",
        "layer_input embed -> embed layer_input",
    ),
    *linear(
        "per_layer_projection",
        "per_layer_input.projection",
        "embed layer_input -> layer_input embed",
    ),
    norm("post_per_layer_input_norm", "per_layer_input.norm"),
)
"""Rules of what a layer does with its input of each token."""

_LAYER_INPUTS = (
    Rule(
        "model.embed_tokens_per_layer.weight",
        "per_layer_inputs.embed_tokens.embedding",
        "layer_input_vocab layer_inputs -> layer_input_vocab layer_inputs",
    ),
    *linear(
        "model.per_layer_model_projection",
        "per_layer_inputs.projection",
        "layer_inputs embed -> embed layer_inputs",
    ),
    norm(
        "model.per_layer_projection_norm",
        "per_layer_inputs.norm",
        "layer_input",
    ),
)


def without_key_value(rules: Rules) -> Rules:
    """Rules of attention to keys and values of an earlier layer."""
    return tuple(r for r in rules if not r.destinations[0].startswith(_KEY_VALUE))


def outer(config: DecoderConfig) -> Rules:
    """What belongs to no layer, with the inputs of all layers if they have any."""
    return outside()(config) + (_LAYER_INPUTS if config.per_layer_input else ())


def ignore(config: DecoderConfig) -> tuple[str, ...]:
    """A tied head, and keys and values that published files have of layers without."""
    layers, sharing = config.num_hidden_layers, config.kv_sharing
    reusing = range(layers - sharing.num_layers if sharing else layers, layers)
    return ignore_tied_head(config) + tuple(
        f"model.layers.{layer}.self_attn.{name}.weight"
        for layer in reusing
        for name in ("k_proj", "v_proj", "k_norm")
    )
