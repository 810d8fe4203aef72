"""Gemma 3, the text model: five layers of six slide, with a rope of their own.

Of checkpoints of the models that also see (`model_type` gemma3), this part is read.

Source: transformers `configuration_gemma3.py`, `modeling_gemma3.py`.
"""

from bridge.families import _gemma
from bridge.families._blocks import ignore_tied_head, key_mapping
from bridge.families._family import Family, Field
from bridge.families._hf_rope import rope_by_layer_type
from bridge.families._layer_types import layer_types

FAMILY = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    fields={
        **_gemma.FIELDS,
        "max_position_embeddings": Field(131072),
        "final_logit_softcapping": Field(None),
    },
    transforms=(
        rope_by_layer_type(1e6, 10000.0, "rope_local_base_freq"),
        layer_types(6, "sliding_window_pattern"),
    ),
    constants={**_gemma.CONSTANTS, "qk_norm": "head"},
    fixed=_gemma.FIXED,
    passthrough={
        **_gemma.PASSTHROUGH,
        "cache_implementation": None,
        # The class has the field, and its attention never reads it.
        "attn_logit_softcapping": None,
    },
    key_mappings=(key_mapping(_gemma.layer),),
    ignore=ignore_tied_head,
)
