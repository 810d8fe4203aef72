"""Qwen3, dense: heads are normed, and wider than the hidden size says.

Its grouped-query attention (GQA) has the rules of `_blocks.attention`.

Source: transformers `configuration_qwen3.py`, `modeling_qwen3.py`.
"""

from bridge.families._blocks import dense_layer, ignore_tied_head, key_mapping
from bridge.families._family import Family, Field
from bridge.families._fields import SIZES, attention_bias, tokens
from bridge.families._hf_rope import rope
from bridge.families._layer_types import switched_window

FAMILY = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    fields={
        **SIZES,
        **tokens(None, None),
        **attention_bias(),
        "num_key_value_heads": Field(32),
        "head_dim": Field(128),
        "max_position_embeddings": Field(32768),
        "rms_norm_eps": Field(1e-6, "norm_eps"),
    },
    transforms=(
        rope(),
        switched_window(lambda layer, fields: layer >= fields["max_window_layers"]),
    ),
    constants={"qk_norm": "head"},
    fixed={"hidden_act": "silu", "attention_dropout": 0.0},
    passthrough={"max_window_layers": 28},
    key_mappings=(key_mapping(dense_layer),),
    ignore=ignore_tied_head,
    also_named=("qwen3_vl_text",),  # text part of Qwen3-VL
    also_architectures=("Qwen3VLForConditionalGeneration",),
)
