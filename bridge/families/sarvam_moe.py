"""Sarvam 30B: GLM-4.5 whose heads rotate as a whole, with q, k and v in one tensor.

Source: transformers `configuration_sarvam_moe.py`, `modeling_glm4_moe.py`, and
`conversion_mapping.py` for the names of the releases.
"""

import dataclasses

from bridge.families import _deepseek, glm4_moe
from bridge.families._blocks import (
    PRE_NORMS,
    Rules,
    attention_out,
    experts,
    head_norms,
    mlp,
    norms,
    outside,
    router,
)
from bridge.families._family import Field, KeyMapping, Layers
from bridge.families._fields import moe, qk_norm_switch, tokens
from bridge.families._fused import qkv_in_turn
from bridge.families._hf_rope import rope
from bridge.families._layer_types import first_dense
from bridge.models import DecoderConfig, LayerKind
from bridge.rules._rules import Rule

_AT = "attention."
_BIAS = Rule("mlp.gate.expert_bias", "mlp.router.correction_bias", "experts -> experts")


def _layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    inner = mlp(config)
    if kind.channels == "sparse":
        inner = router() + experts() + (_BIAS, *_deepseek.shared(config))
    return (
        *qkv_in_turn(config, f"{_AT}query_key_value"),
        *attention_out(config, f"{_AT}dense"),
        *head_norms(config, _AT, ("query_layernorm", "key_layernorm")),
        *inner,
        *norms(PRE_NORMS),
    )


_RELEASES = KeyMapping(
    outside("model.word_embeddings"), Layers("model.layers.{layer}.", _layer)
)

FAMILY = dataclasses.replace(
    glm4_moe.FAMILY,
    model_type="sarvam_moe",
    architecture="SarvamMoEForCausalLM",
    also_architectures=("Glm4MoeForCausalLM",),  # what transformers makes of it
    also_named=(),
    fields={
        **glm4_moe.FAMILY.fields,
        **tokens(None, 1, 0),
        **moe(
            num_experts=("n_routed_experts", 128),
            num_experts_per_tok=("num_experts_per_tok", 6),
            intermediate_size=("moe_intermediate_size", 1024),
            routed_scaling_factor=("routed_scaling_factor", 2.5),
        ),
        "attention_bias": Field(False, aliases=("use_qkv_bias",)),
        "num_key_value_heads": Field(4),
        "head_dim": Field(64),
        "initializer_range": Field(0.006),
        "rms_norm_eps": Field(1e-6, "norm_eps"),
    },
    transforms=(
        rope(8e6, partial=1.0),
        first_dense(1),
        _deepseek.shared_experts(1),
        qk_norm_switch("use_qk_norm", "head", default=True),
    ),
    passthrough={"output_router_logits": False, _deepseek.FURTHER: 0},
    aliases={
        "num_mtp_layers": _deepseek.FURTHER,
        "num_shared_experts": "n_shared_experts",
    },
    # Of published files: what the model has always.
    inert={"score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    key_mappings=(_RELEASES, *glm4_moe.FAMILY.key_mappings),
)
