"""Phi 1, 1.5 and 2 before transformers had them: Phi with q, k and v in one tensor.

Source: microsoft/phi-1_5 `configuration_phi.py`, `modeling_phi.py`.
"""

import dataclasses
from typing import Any

from bridge.families import phi
from bridge.families._blocks import (
    Rules,
    attention_out,
    linear,
    norms,
    ungated_mlp,
)
from bridge.families._family import Field, KeyMapping, Layers
from bridge.families._fused import qkv_in_turn
from bridge.families.releases._read import Fields, reads, without
from bridge.models import DecoderConfig, LayerKind, RopeConfig
from bridge.rules._rules import Rule


def _layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    del kind
    return (
        *qkv_in_turn(config, "mixer.Wqkv"),
        *attention_out(config, "mixer.out_proj"),
        *ungated_mlp(config, "mlp.fc1", "mlp.fc2"),
        *norms({"ln": "input_layernorm"}, bias=True),
    )


def _outside(config: DecoderConfig) -> Rules:
    del config
    table = "vocab embed -> vocab embed"
    return (
        Rule("transformer.embd.wte.weight", "embed_tokens.embedding", table),
        *norms({"lm_head.ln": "norm"}, bias=True),
        *linear(
            "lm_head.linear", "lm_head", "vocab embed -> embed vocab", "vocab -> vocab"
        ),
    )


def _read_sizes(fields: Fields) -> dict[str, Any]:
    width, inner = fields["hidden_size"], fields["n_inner"]
    head_dim = width // fields["num_attention_heads"]
    return {
        "intermediate_size": 4 * width if inner is None else inner,
        "rope": RopeConfig(partial_rotary_factor=fields["rotary_dim"] / head_dim),
    }


FAMILY = dataclasses.replace(
    phi.FAMILY,
    model_type="phi-msft",
    written_as=phi.FAMILY.model_type,
    fields={
        **without(phi.FAMILY.fields, "intermediate_size", "layer_norm_eps"),
        "hidden_size": Field(1024, aliases=("n_embd",)),
        "num_hidden_layers": Field(20, aliases=("n_layer",)),
        "num_attention_heads": Field(16, aliases=("n_head",)),
        "num_key_value_heads": Field(None, aliases=("n_head_kv",)),
        "max_position_embeddings": Field(2048, aliases=("n_positions",)),
        "hidden_act": Field("gelu_new", aliases=("activation_function",)),
        "layer_norm_eps": Field(1e-5, "norm_eps", ("layer_norm_epsilon",)),
    },
    transforms=(reads(_read_sizes, {"n_inner": None, "rotary_dim": 32}),),
    aliases={"attn_pdrop": "attention_dropout"},
    inert={},
    unread=frozenset({"flash_attn", "flash_rotary", "fused_dense"}),
    key_mappings=(KeyMapping(_outside, Layers("transformer.h.{layer}.", _layer)),),
)
