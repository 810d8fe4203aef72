"""OLMo 1: layer norms that neither scale nor shift.

Source: transformers `configuration_olmo.py`, `modeling_olmo.py`.
"""

from bridge.families._blocks import dense_layer, ignore_tied_head, key_mapping
from bridge.families._family import Family, Field
from bridge.families._fields import SIZES, attention_bias, tokens
from bridge.families._hf_rope import rope

FAMILY = Family(
    model_type="olmo",
    architecture="OlmoForCausalLM",
    fields={
        **SIZES,
        **tokens(None, 50279, 1),
        **attention_bias(),
        "max_position_embeddings": Field(2048),
        "clip_qkv": Field(None),
    },
    transforms=(rope(),),
    constants={"norm": "layer", "norm_scale": False, "norm_eps": 1e-5},
    fixed={"hidden_act": "silu", "attention_dropout": 0.0},
    key_mappings=(key_mapping(dense_layer),),
    ignore=ignore_tied_head,
)
