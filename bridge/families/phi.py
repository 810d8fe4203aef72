"""Phi 1, 1.5 and 2: attention and MLP side by side, and biases, of the head as well.

Source: transformers `configuration_phi.py`, `modeling_phi.py`.
"""

from bridge.families import _gpt
from bridge.families._blocks import (
    Rules,
    attention,
    ignore_tied_head,
    norms,
    outside,
    ungated_mlp,
)
from bridge.families._family import Family, Field, KeyMapping, Layers
from bridge.families._fields import SIZES, tokens
from bridge.families._hf_rope import rope
from bridge.models import DecoderConfig, LayerKind

_NORM = {"input_layernorm": "input_layernorm"}


def _layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    del kind
    inner = ungated_mlp(config, "mlp.fc1", "mlp.fc2")
    return attention(config, out="dense") + inner + norms(_NORM, bias=True)


_OUTSIDE = outside(norm="model.final_layernorm")

FAMILY = Family(
    model_type="phi",
    architecture="PhiForCausalLM",
    fields={
        **SIZES,
        **tokens(1, 2),
        "max_position_embeddings": Field(2048),
        "hidden_act": Field("gelu_new"),
        "layer_norm_eps": Field(1e-5, "norm_eps"),
    },
    transforms=(rope(partial=0.5),),
    constants={
        "norm_placement": "parallel",
        "head_bias": True,
        **_gpt.LAYERS,
    },
    fixed={"qk_layernorm": False},
    passthrough={"attention_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    # Of Phi-1's file, which names remote code: the dims that the factor says.
    inert={"rotary_dim": 32},
    key_mappings=(KeyMapping(_OUTSIDE, Layers("model.layers.{layer}.", _layer)),),
    ignore=ignore_tied_head,
)
