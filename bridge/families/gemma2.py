"""Gemma 2: every second layer slides; scores and logits are capped.

Source: transformers `configuration_gemma2.py`, `modeling_gemma2.py`.
"""

from bridge.families import _gemma
from bridge.families._blocks import ignore_tied_head, key_mapping
from bridge.families._family import Family, Field
from bridge.families._hf_rope import rope
from bridge.families._layer_types import layer_types

FAMILY = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    fields={
        **_gemma.FIELDS,
        "max_position_embeddings": Field(8192),
        "final_logit_softcapping": Field(30.0),
        "attn_logit_softcapping": Field(50.0),
    },
    transforms=(rope(), layer_types(2)),
    constants=_gemma.CONSTANTS,
    fixed=_gemma.FIXED,
    passthrough={**_gemma.PASSTHROUGH, "cache_implementation": None},
    key_mappings=(key_mapping(_gemma.layer),),
    ignore=ignore_tied_head,
)
