"""InternLM 1: Llama with biases of all projections of attention.

Source: internlm/internlm-7b `configuration_internlm.py`, `modeling_internlm.py`.
"""

import dataclasses

from bridge.families import llama
from bridge.families.releases import internlm2

FAMILY = dataclasses.replace(
    internlm2.FAMILY,
    model_type="internlm",
    architecture="InternLMForCausalLM",
    key_mappings=llama.FAMILY.key_mappings,
)
