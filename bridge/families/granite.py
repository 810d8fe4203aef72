"""Granite 3 and 4, dense: Llama with multipliers.

Source: transformers `configuration_granite.py`, `modeling_granite.py`.
"""

from bridge.families._blocks import dense_layer, ignore_tied_head, key_mapping
from bridge.families._family import Family, Field
from bridge.families._fields import SIZES, attention_bias, tokens
from bridge.families._hf_rope import rope

FAMILY = Family(
    model_type="granite",
    architecture="GraniteForCausalLM",
    # Text parts of Granite for Docling and of Granite 4 Vision.
    also_named=("granite_docling_text", "granite4_vision_text"),
    fields={
        **SIZES,
        **tokens(1, 2),
        **attention_bias(),
        "max_position_embeddings": Field(2048),
        "rms_norm_eps": Field(1e-6, "norm_eps"),
        "mlp_bias": Field(False),
        "embedding_multiplier": Field(1.0),
        "residual_multiplier": Field(1.0),
        "attention_multiplier": Field(1.0),
        "logits_scaling": Field(1.0),
    },
    transforms=(rope(),),
    fixed={"hidden_act": "silu"},
    passthrough={"attention_dropout": 0.0},
    key_mappings=(key_mapping(dense_layer),),
    ignore=ignore_tied_head,
)
