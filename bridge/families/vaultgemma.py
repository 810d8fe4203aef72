"""VaultGemma: Gemma 2 without norms behind attention and MLP.

Source: transformers `configuration_vaultgemma.py`, `modeling_vaultgemma.py`.
"""

import dataclasses

from bridge.families import _gemma, gemma2
from bridge.families._blocks import Rules, attention, key_mapping, mlp, norms
from bridge.models import DecoderConfig, LayerKind

_NORMS = ("input_layernorm", "pre_feedforward_layernorm")


def _layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    del kind
    return attention(config) + mlp(config) + norms({name: name for name in _NORMS})


FAMILY = dataclasses.replace(
    gemma2.FAMILY,
    model_type="vaultgemma",
    architecture="VaultGemmaForCausalLM",
    constants={**_gemma.CONSTANTS, "norm_placement": "pre"},
    key_mappings=(key_mapping(_layer),),
)
