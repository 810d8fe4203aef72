"""LFM2: gated short convolutions, and attention in some layers.

Source: transformers `configuration_lfm2.py`, `modeling_lfm2.py`.
"""

from collections.abc import Mapping
from typing import Any

from bridge.families._blocks import (
    Rules,
    attention,
    ignore_tied_head,
    linear,
    norms,
    outside,
)
from bridge.families._family import Family, Field, KeyMapping, Layers
from bridge.families._field_transform import FieldTransform
from bridge.families._fields import SIZES, tokens
from bridge.families._hf_rope import rope
from bridge.families._layer_types import FULL, mixer_types
from bridge.models import DecoderConfig, LayerKind

NORMS = {
    "operator_norm": "input_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
}


def short_conv(config: DecoderConfig) -> Rules:
    """A gated short convolution."""
    at, to = "conv.", "short_conv."
    assert config.short_conv is not None
    bias = config.short_conv.bias
    inside = "(three embed_out) embed -> embed three embed_out"
    back = "embed embed_out -> embed_out embed"
    conv = "embed one conv_kernel -> embed (one conv_kernel)"
    return (
        *linear(
            f"{at}in_proj",
            f"{to}in_proj",
            inside,
            "(three embed) -> three embed" if bias else None,
        ),
        *linear(f"{at}conv", f"{to}conv", conv, "embed -> embed" if bias else None),
        *linear(
            f"{at}out_proj",
            f"{to}out_proj",
            back,
            "embed -> embed" if bias else None,
        ),
    )


def mlp() -> Rules:
    """A dense MLP."""
    at, wide = "feed_forward.", "mlp embed -> embed mlp"
    return (
        *linear(f"{at}w1", "mlp.gate_proj", wide),
        *linear(f"{at}w3", "mlp.up_proj", wide),
        *linear(f"{at}w2", "mlp.down_proj", "embed mlp -> mlp embed"),
    )


def mixer(config: DecoderConfig, kind: LayerKind) -> Rules:
    """What mixes the tokens of a layer, and the norms of the layer."""
    if kind.mixer == "short_conv":
        own = short_conv(config)
    else:
        own = attention(config, out="out_proj", norms=("q_layernorm", "k_layernorm"))
    return own + norms(NORMS)


def layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    """A layer with a dense MLP."""
    return mixer(config, kind) + mlp()


_WIDTH = {
    "intermediate_size": 12288,
    "block_auto_adjust_ff_dim": True,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
}


def _read_width(fields: Mapping[str, Any]) -> dict[str, Any]:
    width, times = fields["intermediate_size"], fields["block_ffn_dim_multiplier"]
    if fields["block_auto_adjust_ff_dim"]:
        width, multiple = int(2 * width / 3), fields["block_multiple_of"]
        if times is not None:
            width = multiple * -(-int(times * width) // multiple)
    return {"intermediate_size": width}


def _write_width(config: DecoderConfig) -> dict[str, Any]:
    return {
        **_WIDTH,
        "intermediate_size": config.intermediate_size,
        "block_auto_adjust_ff_dim": False,
    }


def _read_old_types(fields: Mapping[str, Any]) -> list[str]:
    layers = range(fields["num_hidden_layers"])
    attends = fields["full_attn_idxs"]
    return [FULL if attends is None or i in attends else "conv" for i in layers]


FAMILY = Family(
    model_type="lfm2",
    architecture="Lfm2ForCausalLM",
    fields={
        **{name: f for name, f in SIZES.items() if name != "intermediate_size"},
        **tokens(1, 2, 0),
        "num_key_value_heads": Field(8),
        "max_position_embeddings": Field(128000),
        "norm_eps": Field(1e-5),
        "tie_word_embeddings": Field(True, aliases=("tie_embedding",)),
        "conv_L_cache": Field(3, "short_conv.kernel_size"),
        "conv_bias": Field(False, "short_conv.bias"),
    },
    transforms=(
        rope(1000000.0),
        mixer_types({"conv": "short_conv"}, _read_old_types, {"full_attn_idxs": None}),
        FieldTransform(tuple(_WIDTH), _read_width, _write_width, _WIDTH),
    ),
    aliases={"block_ff_dim": "intermediate_size"},
    constants={"qk_norm": "head"},
    key_mappings=(
        KeyMapping(
            outside(norm="model.embedding_norm"),
            Layers("model.layers.{layer}.", layer),
        ),
    ),
    ignore=ignore_tied_head,
)
