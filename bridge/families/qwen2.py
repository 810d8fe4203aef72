"""Qwen2 and Qwen2.5: biases on queries, keys and values.

Source: transformers `configuration_qwen2.py`, `modeling_qwen2.py`.
"""

from bridge.families._blocks import dense_layer, ignore_tied_head, key_mapping
from bridge.families._family import Family, Field
from bridge.families._fields import SIZES, tokens
from bridge.families._hf_rope import rope
from bridge.families._layer_types import switched_window

FAMILY = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    fields={
        **SIZES,
        **tokens(None, None),
        "num_key_value_heads": Field(32),
        "max_position_embeddings": Field(32768),
        "rms_norm_eps": Field(1e-6, "norm_eps"),
    },
    transforms=(
        rope(),
        switched_window(lambda layer, fields: layer >= fields["max_window_layers"]),
    ),
    constants={"attention_bias": True},
    fixed={"hidden_act": "silu", "attention_dropout": 0.0},
    passthrough={"max_window_layers": 28},
    key_mappings=(key_mapping(dense_layer),),
    ignore=ignore_tied_head,
    # Text parts of Qwen2-VL and Qwen2.5-VL.
    also_named=("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text"),
    also_architectures=(
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
    ),
)
