"""Granite with experts and a window: sinks, and a base of each layer's rope.

Source: transformers `configuration_granitemoe_swa.py`, `modeling_granitemoe_swa.py`.
"""

import dataclasses

from bridge.families import granitemoeshared
from bridge.families._blocks import (
    FUSED_EXPERTS,
    PRE_NORMS,
    Rules,
    attention,
    key_mapping,
    norms,
    router,
)
from bridge.families._family import Field
from bridge.families.granite_swa import LAYERS, SINKS
from bridge.models import DecoderConfig, LayerKind

_AT = "block_sparse_moe."
_EXPERTS = (
    *router(f"{_AT}router"),
    *(
        dataclasses.replace(rule, source=rule.sources[0].replace("mlp.", _AT))
        for rule in FUSED_EXPERTS
    ),
)


def _layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    del kind
    inner = _EXPERTS + granitemoeshared.shared_mlp(config)
    return (*attention(config), SINKS, *inner, *norms(PRE_NORMS))


FAMILY = dataclasses.replace(
    granitemoeshared.FAMILY,
    model_type="granitemoe_swa",
    architecture="GraniteMoeSWAForCausalLM",
    fields={**granitemoeshared.FAMILY.fields, "sliding_window": Field(128)},
    transforms=(LAYERS, granitemoeshared.SHARED),
    constants={**granitemoeshared.FAMILY.constants, "attention_sinks": True},
    key_mappings=(key_mapping(_layer),),
)
