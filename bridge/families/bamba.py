"""Bamba: Mamba 2 mixers, and attention in the layers that are listed.

Source: transformers `configuration_bamba.py`, `modeling_bamba.py`.
"""

from collections.abc import Mapping
from typing import Any

from bridge.families._blocks import (
    Rules,
    attention,
    ignore_tied_head,
    mlp,
    norms,
    outside,
)
from bridge.families._family import Family, Field, KeyMapping, Layers
from bridge.families._field_transform import FieldTransform
from bridge.families._fields import SIZES, attention_bias, tokens
from bridge.families._hf_rope import rope
from bridge.families._layer_types import FULL
from bridge.families._mamba import mamba, mamba_sizes
from bridge.models import DecoderConfig, LayerKind

_NORMS = {
    "input_layernorm": "input_layernorm",
    "pre_ff_layernorm": "pre_feedforward_layernorm",
}


def _layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    mixer = mamba(config) if kind.mixer == "mamba" else attention(config)
    return mixer + mlp(config, "feed_forward.") + norms(_NORMS)


def _rope() -> FieldTransform:
    """Reads a rope; transformers takes half of a head, and no field beside the rope."""
    base, factor = rope(partial=0.5), "partial_rotary_factor"

    def read(fields: Mapping[str, Any]) -> dict[str, Any]:
        if fields[factor] not in (None, 0.5):
            raise ValueError(
                f"{factor} = {fields[factor]!r}: transformers takes 0.5 for it; write "
                "it into rope_parameters, which it reads"
            )
        return base.read(fields)

    def write(config: DecoderConfig) -> dict[str, Any]:
        return {n: value for n, value in base.write(config).items() if n != factor}

    return FieldTransform(base.names, read, write, base.defaults)


_ATTEND = "attn_layer_indices"


def _read_types(fields: Mapping[str, Any]) -> dict[str, Any]:
    count, attend = fields["num_hidden_layers"], fields[_ATTEND] or ()
    if beyond := [layer for layer in attend if not 0 <= layer < count]:
        raise ValueError(f"{_ATTEND} has {beyond}, but there are {count} layers")
    return {
        "layer_types": tuple(FULL if i in attend else "mamba" for i in range(count))
    }


def _write_types(config: DecoderConfig) -> dict[str, Any]:
    types = config.layer_types or (FULL,) * config.num_hidden_layers
    return {_ATTEND: [i for i, kind in enumerate(types) if kind == FULL]}


FAMILY = Family(
    model_type="bamba",
    architecture="BambaForCausalLM",
    fields={
        **SIZES,
        **tokens(1, 2, 0),
        **attention_bias(),
        "num_key_value_heads": Field(8),
        "max_position_embeddings": Field(262144),
        "rms_norm_eps": Field(1e-5, "norm_eps"),
    },
    transforms=(
        _rope(),
        FieldTransform((_ATTEND,), _read_types, _write_types, {_ATTEND: None}),
        mamba_sizes(
            mamba_n_heads=128,
            mamba_n_groups=1,
            mamba_d_state=256,
            mamba_d_head="auto",
            mamba_d_conv=4,
            mamba_expand=2,
            mamba_chunk_size=256,
            mamba_conv_bias=True,
            mamba_proj_bias=False,
        ),
    ),
    fixed={"hidden_act": "silu", "mlp_bias": False},
    optional=("mamba",),
    passthrough={
        "attention_dropout": 0.0,
        "num_logits_to_keep": 1,
        "z_loss_coefficient": 0.0,
    },
    key_mappings=(
        KeyMapping(
            outside(norm="model.final_layernorm"),
            Layers("model.layers.{layer}.", _layer),
        ),
    ),
    ignore=ignore_tied_head,
)
