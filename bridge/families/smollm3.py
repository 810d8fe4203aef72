"""SmolLM3: Llama of which every fourth layer has no rope (NoPE).

Source: transformers `configuration_smollm3.py`, `modeling_smollm3.py`.
"""

from collections.abc import Mapping
from typing import Any

from bridge.families._blocks import dense_layer, ignore_tied_head, key_mapping
from bridge.families._family import Family, Field
from bridge.families._fields import SIZES, attention_bias, tokens
from bridge.families._hf_rope import rope
from bridge.families._layer_types import NO_ROPE_LAYERS, switched_window


def _slides(layer: int, fields: Mapping[str, Any]) -> bool:
    return layer in NO_ROPE_LAYERS.read(fields)["no_rope_layers"]


FAMILY = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    fields={
        **SIZES,
        **tokens(128000, 128001, 128004),
        **attention_bias(),
        "num_key_value_heads": Field(4),
        "tie_word_embeddings": Field(True),
        "max_position_embeddings": Field(32768),
        "rms_norm_eps": Field(1e-6, "norm_eps"),
        "mlp_bias": Field(False),
    },
    transforms=(
        rope(2e6),
        NO_ROPE_LAYERS,
        switched_window(_slides, default=None),
    ),
    fixed={"hidden_act": "silu", "attention_dropout": 0.0},
    passthrough={"max_window_layers": None, "pretraining_tp": 2},
    key_mappings=(key_mapping(dense_layer),),
    ignore=ignore_tied_head,
)
