"""OPT: learned positions that begin at row 2, biases everywhere, ReLU.

Models that norm behind attention and MLP, or whose embedding is narrower than their
layers (both: 350M), are refused.

Source: transformers `configuration_opt.py`, `modeling_opt.py`.
"""

from collections.abc import Mapping
from typing import Any

from bridge.families import _gpt
from bridge.families._blocks import (
    Rules,
    attention,
    ignore_tied_head,
    norms,
    outside,
    ungated_mlp,
)
from bridge.families._family import Family, Field, KeyMapping, Layers
from bridge.families._field_transform import FieldTransform
from bridge.families._fields import tokens
from bridge.models import DecoderConfig, LayerKind
from bridge.rules._rules import Rule

_NORMS = {
    "self_attn_layer_norm": "input_layernorm",
    "final_layer_norm": "pre_feedforward_layernorm",
}


def layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    """A layer with norms before attention and MLP, and biases everywhere."""
    del kind
    inner = ungated_mlp(config, "fc1", "fc2")
    return attention(config, out="out_proj") + inner + norms(_NORMS, bias=True)


def _key_mapping(prefix: str) -> KeyMapping:
    of_all = outside(f"{prefix}embed_tokens", f"{prefix}final_layer_norm")
    positions = Rule(
        f"{prefix}embed_positions.weight",
        "embed_positions.embedding",
        "positions embed -> positions embed",
    )
    return KeyMapping(
        lambda config: (*of_all(config), positions),
        Layers(prefix + "layers.{layer}.", layer),
    )


def _read_width(fields: Mapping[str, Any]) -> dict[str, Any]:
    narrow = fields["word_embed_proj_dim"]
    if narrow not in (None, fields["hidden_size"]):
        raise ValueError(
            f"word_embed_proj_dim = {narrow!r}: only hidden_size = "
            f"{fields['hidden_size']!r} is modelled"
        )
    return {}


_WIDTH = FieldTransform(
    ("word_embed_proj_dim",),
    _read_width,
    lambda config: {"word_embed_proj_dim": config.hidden_size},
    {"word_embed_proj_dim": None},
)

FAMILY = Family(
    model_type="opt",
    architecture="OPTForCausalLM",
    fields={
        **tokens(2, 2, 1),
        "vocab_size": Field(50272),
        "hidden_size": Field(768),
        "num_hidden_layers": Field(12),
        "num_attention_heads": Field(12),
        "ffn_dim": Field(3072, "intermediate_size"),
        "max_position_embeddings": Field(2048),
        "activation_function": Field("relu", "hidden_act"),
        "init_std": Field(0.02, "initializer_range"),
        "tie_word_embeddings": Field(True),
    },
    transforms=(_WIDTH,),
    constants={
        "rope": None,
        "position_offset": 2,
        "norm_eps": 1e-5,
        **_gpt.LAYERS,
    },
    fixed={
        "do_layer_norm_before": True,
        "_remove_final_layer_norm": False,
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
    },
    passthrough={
        "dropout": 0.1,
        "attention_dropout": 0.0,
        "layerdrop": 0.0,
        "initializer_range": None,  # transformers reads init_std.
    },
    key_mappings=(_key_mapping("model.decoder."), _key_mapping("decoder.")),
    ignore=ignore_tied_head,
)
