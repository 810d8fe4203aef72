"""Mistral 7B, Nemo, Small, and their kin: Llama with a window.

Source: transformers `configuration_mistral.py`, `modeling_mistral.py`.
"""

from bridge.families._blocks import dense_layer, ignore_tied_head, key_mapping
from bridge.families._family import Family, Field
from bridge.families._fields import SIZES, tokens
from bridge.families._hf_rope import rope
from bridge.families._layer_types import window_of_all

FAMILY = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    fields={
        **SIZES,
        **tokens(1, 2),
        "num_key_value_heads": Field(8),
        "max_position_embeddings": Field(4096 * 32),
        "rms_norm_eps": Field(1e-6, "norm_eps"),
    },
    # A file without the field has a window: only null turns it off.
    transforms=(rope(), window_of_all(4096)),
    fixed={"hidden_act": "silu", "attention_dropout": 0.0},
    key_mappings=(key_mapping(dense_layer),),
    ignore=ignore_tied_head,
)
