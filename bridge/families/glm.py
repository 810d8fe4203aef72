"""GLM-4 (9B, 2024): GLM-4-0414 without the norms behind attention and MLP.

Source: transformers `configuration_glm.py`, `modeling_glm.py`.
"""

import dataclasses

from bridge.families import glm4
from bridge.families._blocks import (
    PRE_NORMS,
    Rules,
    attention,
    fused_gate_up,
    key_mapping,
    norms,
)
from bridge.models import DecoderConfig, LayerKind


def _layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    del kind
    return attention(config) + fused_gate_up(config) + norms(PRE_NORMS)


FAMILY = dataclasses.replace(
    glm4.FAMILY,
    model_type="glm",
    architecture="GlmForCausalLM",
    also_named=(),
    constants={},
    key_mappings=(key_mapping(_layer),),
)
