"""Ministral 3 and Devstral 2, the text models: Mistral with a yarn of its own.

Queries grow with their position, by `llama_4_scaling_beta` of the rope.

Source: transformers `configuration_ministral3.py`, `modeling_ministral3.py`.
"""

from bridge.families._blocks import dense_layer, ignore_tied_head, key_mapping
from bridge.families._family import Family, Field
from bridge.families._fields import SIZES, tokens
from bridge.families._growing_queries import BETA, rope_with_beta
from bridge.families._hf_rope import rope
from bridge.families._layer_types import window_of_all

_ABSENT = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    BETA: 0.1,
}
FAMILY = Family(
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    fields={
        **SIZES,
        **tokens(1, 2, 11),
        "num_key_value_heads": Field(8),
        "head_dim": Field(128),
        "max_position_embeddings": Field(262144),
        "rms_norm_eps": Field(1e-5, "norm_eps"),
    },
    transforms=(
        rope_with_beta(rope(1e6), _ABSENT),
        window_of_all(),
    ),
    fixed={"hidden_act": "silu", "attention_dropout": 0.0},
    key_mappings=(key_mapping(dense_layer),),
    ignore=ignore_tied_head,
)
