"""EXAONE 4: norms behind attention and MLP and of each head; full layers have no rope.

Models of full layers alone, without a window, have a rope in all of them.

Source: transformers `configuration_exaone4.py`, `modeling_exaone4.py`.
"""

from bridge.families import _olmo
from bridge.families._blocks import ignore_tied_head, key_mapping
from bridge.families._family import Family, Field
from bridge.families._fields import SIZES, tokens
from bridge.families._hf_rope import rope
from bridge.families._layer_types import turned_where_sliding

FAMILY = Family(
    model_type="exaone4",
    also_named=("exaone4_5_text",),  # of EXAONE 4.5's first files, with images
    architecture="Exaone4ForCausalLM",
    fields={
        **SIZES,
        **tokens(0, 2),
        "num_key_value_heads": Field(32),
        "max_position_embeddings": Field(2048),
        "rms_norm_eps": Field(1e-5, "norm_eps"),
    },
    transforms=(rope(), turned_where_sliding(4)),
    constants={"norm_placement": "post", "qk_norm": "head"},
    fixed={"hidden_act": "silu", "attention_dropout": 0.0},
    key_mappings=(key_mapping(_olmo.layer),),
    ignore=ignore_tied_head,
)
