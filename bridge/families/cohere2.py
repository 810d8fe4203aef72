"""Command A and R7B: three layers of four slide, and only those have a rope.

Source: transformers `configuration_cohere2.py`, `modeling_cohere2.py`.
"""

from bridge.families import cohere
from bridge.families._blocks import ignore_tied_head, key_mapping
from bridge.families._family import Family
from bridge.families._hf_rope import rope
from bridge.families._layer_types import turned_where_sliding

FAMILY = Family(
    model_type="cohere2",
    architecture="Cohere2ForCausalLM",
    fields=cohere.FAMILY.fields,
    transforms=(rope(interleaved=True), turned_where_sliding(4)),
    constants=cohere.FAMILY.constants,
    fixed=cohere.FAMILY.fixed,
    key_mappings=(key_mapping(cohere.layer),),
    ignore=ignore_tied_head,
)
