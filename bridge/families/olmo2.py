"""OLMo 2.

Source: transformers `configuration_olmo2.py`, `modeling_olmo2.py`.
"""

from bridge.families import _olmo
from bridge.families._blocks import ignore_tied_head, key_mapping
from bridge.families._family import Family
from bridge.families._hf_rope import rope

FAMILY = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    fields=_olmo.FIELDS,
    transforms=(rope(),),
    constants=_olmo.CONSTANTS,
    fixed=_olmo.FIXED,
    key_mappings=(key_mapping(_olmo.layer),),
    ignore=ignore_tied_head,
)
