"""ERNIE 4.5 (0.3B): Llama with interleaved rope.

Source: transformers `configuration_ernie4_5.py`, `modeling_ernie4_5.py`.
"""

from bridge.families import _ernie
from bridge.families._blocks import dense_layer, ignore_tied_head, key_mapping
from bridge.families._family import Family, Field

FAMILY = Family(
    model_type="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    fields={
        **_ernie.FIELDS,
        "num_key_value_heads": Field(2),
        "head_dim": Field(128),
        "use_bias": Field(False, ("attention_bias", "attention_out_bias", "mlp_bias")),
    },
    transforms=(_ernie.ROPE,),
    fixed=_ernie.FIXED,
    key_mappings=(key_mapping(dense_layer),),
    ignore=ignore_tied_head,
)
