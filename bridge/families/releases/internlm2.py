"""InternLM 2 and 2.5: Llama with q, k and v in one tensor.

Source: internlm/internlm2-7b `configuration_internlm2.py`, `modeling_internlm2.py`.
"""

import dataclasses

from bridge.families import llama
from bridge.families._blocks import Rules, attention_out, linear, norms, outside
from bridge.families._family import Field, KeyMapping, Layers
from bridge.families._fused import fused_qkv
from bridge.models import DecoderConfig, LayerKind

_NORMS = {
    "attention_norm": "input_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
}


def _layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    del kind
    wide, at = "mlp embed -> embed mlp", "feed_forward."
    return (
        *fused_qkv(config, "attention.wqkv"),
        *attention_out(config, "attention.wo"),
        *linear(at + "w1", "mlp.gate_proj", wide),
        *linear(at + "w3", "mlp.up_proj", wide),
        *linear(at + "w2", "mlp.down_proj", "embed mlp -> mlp embed"),
        *norms(_NORMS),
    )


FAMILY = dataclasses.replace(
    llama.FAMILY,
    model_type="internlm2",
    architecture="InternLM2ForCausalLM",
    written_as=llama.FAMILY.model_type,
    fields={
        **llama.FAMILY.fields,
        "attention_bias": Field(
            True, ("attention_bias", "attention_out_bias"), ("bias",)
        ),
        "mlp_bias": Field(False),
    },
    key_mappings=(
        KeyMapping(
            outside("model.tok_embeddings", "model.norm", "output"),
            Layers("model.layers.{layer}.", _layer),
        ),
    ),
)
