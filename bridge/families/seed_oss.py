"""Seed-OSS: Llama with biases of q, k and v.

Source: transformers `configuration_seed_oss.py`, `modeling_seed_oss.py`.
"""

from bridge.families._blocks import dense_layer, ignore_tied_head, key_mapping
from bridge.families._family import Family, Field
from bridge.families._fields import SIZES, attention_bias, tokens
from bridge.families._hf_rope import rope

FAMILY = Family(
    model_type="seed_oss",
    architecture="SeedOssForCausalLM",
    fields={
        **SIZES,
        **tokens(0, 2, 1),
        **attention_bias(True, out=False),
        "attention_out_bias": Field(False),
        "num_key_value_heads": Field(8),
        "head_dim": Field(128),
        "max_position_embeddings": Field(524288),
        "rms_norm_eps": Field(1e-6, "norm_eps"),
        "mlp_bias": Field(False),
    },
    transforms=(rope(),),
    fixed={"hidden_act": "silu"},
    passthrough={"attention_dropout": 0.1, "residual_dropout": 0.1},
    key_mappings=(key_mapping(dense_layer),),
    ignore=ignore_tied_head,
)
