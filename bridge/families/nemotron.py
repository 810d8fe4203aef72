"""Nemotron 3 and 4, Minitron: squared ReLU, layer norms stored less one.

Source: transformers `configuration_nemotron.py`, `modeling_nemotron.py`.
"""

from bridge.families._blocks import dense_layer, ignore_tied_head, key_mapping
from bridge.families._family import Family, Field
from bridge.families._fields import SIZES, attention_bias, tokens
from bridge.families._hf_rope import rope

FAMILY = Family(
    model_type="nemotron",
    architecture="NemotronForCausalLM",
    fields={
        **SIZES,
        **tokens(2, 3),
        **attention_bias(),
        "max_position_embeddings": Field(4096),
        "initializer_range": Field(0.0134),
        "norm_eps": Field(1e-5),
        "mlp_bias": Field(False),
        "hidden_act": Field("relu2"),
    },
    transforms=(rope(partial=0.5),),
    constants={"norm": "layer_zero_centered", "norm_bias": True, "gated_mlp": False},
    fixed={"attention_dropout": 0.0},
    key_mappings=(key_mapping(dense_layer),),
    ignore=ignore_tied_head,
)
