"""DiffLlama: Llama with differential attention.

Source: transformers `configuration_diffllama.py`, `modeling_diffllama.py`.
"""

import dataclasses

from bridge.families import llama
from bridge.families._blocks import Rules, dense_layer, key_mapping
from bridge.families._family import Field
from bridge.models import DecoderConfig, LayerKind
from bridge.rules._rules import Rule

_VECTORS: Rules = tuple(
    Rule(f"self_attn.{name}", f"self_attn.{name}", "head_dim -> head_dim")
    for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
)


def _layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    return dense_layer(config, kind) + _VECTORS


_FIELDS = {n: f for n, f in llama.FAMILY.fields.items() if n != "mlp_bias"}

FAMILY = dataclasses.replace(
    llama.FAMILY,
    model_type="diffllama",
    architecture="DiffLlamaForCausalLM",
    also_named=(),
    fields={**_FIELDS, "rms_norm_eps": Field(1e-5, "norm_eps")},
    constants={"differential_attention": True},
    # How the vectors are initialized.
    passthrough={"lambda_std_dev": 0.1},
    key_mappings=(key_mapping(_layer),),
)
