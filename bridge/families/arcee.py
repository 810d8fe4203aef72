"""Arcee AFM: Llama with an MLP without a gate, of squared ReLU.

Source: transformers `configuration_arcee.py`, `modeling_arcee.py`.
"""

from bridge.families._blocks import dense_layer, ignore_tied_head, key_mapping
from bridge.families._family import Family, Field
from bridge.families._fields import SIZES, attention_bias, tokens
from bridge.families._hf_rope import rope

FAMILY = Family(
    model_type="arcee",
    architecture="ArceeForCausalLM",
    fields={
        **SIZES,
        **tokens(128000, 128001),
        **attention_bias(),
        "max_position_embeddings": Field(4096),
        "rms_norm_eps": Field(1e-5, "norm_eps"),
        "mlp_bias": Field(False),
        "hidden_act": Field("relu2"),
    },
    transforms=(rope(),),
    constants={"gated_mlp": False},
    fixed={"attention_dropout": 0.0},
    key_mappings=(key_mapping(dense_layer),),
    ignore=ignore_tied_head,
)
