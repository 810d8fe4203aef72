"""Helium: Llama whose pairs of a rope are neighbours.

Source: transformers `configuration_helium.py`, `modeling_helium.py`.
"""

from bridge.families._blocks import dense_layer, ignore_tied_head, key_mapping
from bridge.families._family import Family, Field
from bridge.families._fields import SIZES, attention_bias, tokens
from bridge.families._hf_rope import rope

FAMILY = Family(
    model_type="helium",
    architecture="HeliumForCausalLM",
    fields={
        **SIZES,
        **tokens(1, 2, 3),
        **attention_bias(out=False),
        "num_key_value_heads": Field(20),
        "head_dim": Field(128),
        "max_position_embeddings": Field(4096),
        "rms_norm_eps": Field(1e-8, "norm_eps"),
        "mlp_bias": Field(False),
    },
    transforms=(rope(100000.0, interleaved=True),),
    constants={"norm": "rms_wide"},
    fixed={"hidden_act": "silu", "attention_dropout": 0.0},
    passthrough={"pretraining_tp": 1},
    key_mappings=(key_mapping(dense_layer),),
    ignore=ignore_tied_head,
)
