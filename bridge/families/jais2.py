"""Jais 2: layer norms, biases, and an MLP without a gate, of squared ReLU.

Source: transformers `configuration_jais2.py`, `modeling_jais2.py`.
"""

from bridge.families._blocks import dense_layer, ignore_tied_head, key_mapping
from bridge.families._family import Family, Field
from bridge.families._fields import SIZES, attention_bias, tokens
from bridge.families._hf_rope import rope

FAMILY = Family(
    model_type="jais2",
    architecture="Jais2ForCausalLM",
    fields={
        **SIZES,
        **tokens(0, 150024),
        **attention_bias(True),
        "max_position_embeddings": Field(8192),
        "layer_norm_eps": Field(1e-5, "norm_eps"),
        "mlp_bias": Field(True),
        "hidden_act": Field("relu2"),
    },
    transforms=(rope(),),
    constants={"norm": "layer", "norm_bias": True, "gated_mlp": False},
    fixed={"attention_dropout": 0.0},
    key_mappings=(key_mapping(dense_layer),),
    ignore=ignore_tied_head,
)
