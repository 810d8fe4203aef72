"""OLMo 3: OLMo 2 of which three layers of four slide.

Source: transformers `configuration_olmo3.py`, `modeling_olmo3.py`.
"""

from bridge.families import _olmo
from bridge.families._blocks import ignore_tied_head, key_mapping
from bridge.families._family import Family, Field
from bridge.families._hf_rope import rope_by_layer_type
from bridge.families._layer_types import layer_types

FAMILY = Family(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    fields={**_olmo.FIELDS, "sliding_window": Field(4096)},
    transforms=(rope_by_layer_type(500000.0, 500000.0), layer_types(4)),
    constants=_olmo.CONSTANTS,
    fixed=_olmo.FIXED,
    key_mappings=(key_mapping(_olmo.layer),),
    ignore=ignore_tied_head,
)
