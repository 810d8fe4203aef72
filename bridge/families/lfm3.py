"""LFM3: layers of LFM2, of which some slide, between two norms, with a gate a head.

Source: transformers `configuration_lfm3.py`, `modeling_lfm3.py`, and
`conversion_mapping.py` for the name of the gate in files.
"""

from collections.abc import Callable, Mapping
from typing import Any

from bridge.families import lfm2
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
from bridge.families._hf_rope import rope_by_layer_type
from bridge.families._layer_types import FULL, SLIDING, mixer_types
from bridge.models import DecoderConfig, LayerKind

_BEHIND = {
    "post_operator_norm": "post_attention_layernorm",
    "post_ffn_norm": "post_feedforward_layernorm",
}


def _layer(gate: str) -> Callable[[DecoderConfig, LayerKind], Rules]:
    """Returns the rules of a layer.

    Args:
      gate: Name of the gate of each head.
    """

    def rules(config: DecoderConfig, kind: LayerKind) -> Rules:
        names = lfm2.NORMS | (_BEHIND if config.norm_placement == "both" else {})
        if kind.mixer == "short_conv":
            own = lfm2.short_conv(config)
        else:
            own = attention(config)
            if config.attention_gate:
                layout = "(heads one) embed -> embed heads one"
                own += linear(f"self_attn.{gate}", "self_attn.q_gate", layout)
        return own + lfm2.mlp() + norms(names)

    return rules


def _key_mapping(gate: str) -> KeyMapping:
    return KeyMapping(
        outside(norm="model.embedding_norm"),
        Layers("model.layers.{layer}.", _layer(gate)),
    )


def _absent(fields: Mapping[str, Any]) -> list[str]:
    by_remainder = {0: SLIDING, 2: FULL}
    layers = range(fields["num_hidden_layers"])
    return [by_remainder.get(i % 4, "conv") if i else "conv" for i in layers]


_BOTH, _GATE = "use_sandwich_norm", "use_attention_gate"
_SWITCHES = FieldTransform(
    (_BOTH, _GATE),
    lambda fields: {
        "norm_placement": "both" if fields[_BOTH] else "pre",
        "attention_gate": fields[_GATE],
        "attention_gate_per_head": fields[_GATE],
    },
    lambda config: {
        _BOTH: config.norm_placement == "both",
        _GATE: config.attention_gate,
    },
    {_BOTH: True, _GATE: True},
)

FAMILY = Family(
    model_type="lfm3",
    architecture="Lfm3ForCausalLM",
    fields={
        **SIZES,
        **tokens(124894, 124900, 124893),
        "num_key_value_heads": Field(4),
        "head_dim": Field(128),
        "max_position_embeddings": Field(128000),
        "norm_eps": Field(1e-5, aliases=("rms_norm_eps",)),
        "tie_word_embeddings": Field(True, aliases=("tie_embedding",)),
        "conv_L_cache": Field(7, "short_conv.kernel_size"),
        "conv_bias": Field(False, "short_conv.bias"),
        "sliding_window": Field(256),
    },
    transforms=(
        rope_by_layer_type(
            1e6,
            1e4,
            default={
                "rope_type": "proportional",
                "rope_theta": 1e6,
                "partial_rotary_factor": 0.5,
            },
        ),
        mixer_types({"conv": "short_conv", SLIDING: SLIDING}, _absent),
        _SWITCHES,
    ),
    constants={"qk_norm": "head"},
    fixed={"attention_bias": False, "attention_dropout": 0.0},
    # Files have a name of their own for the gate.
    key_mappings=(_key_mapping("gate_proj"), _key_mapping("g_proj")),
    ignore=ignore_tied_head,
)
