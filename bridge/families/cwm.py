"""Code World Model: Llama of which all but every fourth layer slide.

Source: transformers `configuration_cwm.py`, `modeling_cwm.py`.
"""

from bridge.families._blocks import dense_layer, ignore_tied_head, key_mapping
from bridge.families._family import Family, Field
from bridge.families._fields import SIZES, tokens
from bridge.families._hf_rope import rope
from bridge.families._layer_types import first_of_four_full, sliding_or_full

FAMILY = Family(
    model_type="cwm",
    architecture="CwmForCausalLM",
    fields={
        **SIZES,
        **tokens(128000, (128001, 128008, 128009)),
        "num_key_value_heads": Field(8),
        "head_dim": Field(128),
        "max_position_embeddings": Field(131072),
        "rms_norm_eps": Field(1e-5, "norm_eps"),
        "mlp_bias": Field(False),
        "sliding_window": Field(8192),
    },
    transforms=(
        rope(
            1e6,
            absent={
                "rope_type": "llama3",
                "rope_theta": 1e6,
                "factor": 16.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        ),
        sliding_or_full(first_of_four_full),
    ),
    fixed={"hidden_act": "silu", "attention_dropout": 0.0},
    passthrough={"pretraining_tp": 1},
    key_mappings=(key_mapping(dense_layer),),
    ignore=ignore_tied_head,
)
