"""Phi-3, Phi-3.5 and Phi-4: q, k and v, gate and up, each in one tensor.

Source: transformers `configuration_phi3.py`, `modeling_phi3.py`.
"""

from bridge.families._blocks import (
    PRE_NORMS,
    Rules,
    attention_out,
    fused_gate_up,
    ignore_tied_head,
    key_mapping,
    norms,
)
from bridge.families._family import Family, Field
from bridge.families._fields import SIZES, tokens
from bridge.families._fused import qkv_in_turn
from bridge.families._hf_rope import rope
from bridge.families._layer_types import window_of_all
from bridge.models import DecoderConfig, LayerKind


def _layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    del kind
    qkv = qkv_in_turn(config, "self_attn.qkv_proj")
    return qkv + attention_out(config) + fused_gate_up(config) + norms(PRE_NORMS)


FAMILY = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    fields={
        **SIZES,
        **tokens(1, 32000, 32000),
        "max_position_embeddings": Field(4096),
        "rms_norm_eps": Field(1e-5, "norm_eps"),
    },
    transforms=(
        # transformers takes the type yarn of these files for longrope.
        rope(partial=1.0, types=("default", "longrope"), original_length=4096),
        window_of_all(),
    ),
    fixed={
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "attention_bias": False,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
    },
    # Of Phi-4-mini's files, which name remote code; transformers' own reads neither.
    inert={"full_attn_mod": 1, "interpolate_factor": 1},
    key_mappings=(key_mapping(_layer),),
    ignore=ignore_tied_head,
)
