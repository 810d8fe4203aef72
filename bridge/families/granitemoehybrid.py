"""Granite 4: Mamba 2 mixers, attention in some layers, a shared MLP and experts.

Source: transformers `configuration_granitemoehybrid.py`,
`modeling_granitemoehybrid.py`.
"""

from collections.abc import Mapping
from typing import Any

from bridge.families import granitemoe
from bridge.families._blocks import (
    PRE_NORMS,
    Rules,
    attention,
    ignore_tied_head,
    key_mapping,
    linear,
    norms,
)
from bridge.families._family import Family
from bridge.families._field_transform import FieldTransform
from bridge.families._hf_rope import rope
from bridge.families._layer_types import FULL, mixer_types
from bridge.families._mamba import mamba, mamba_sizes
from bridge.models import DecoderConfig, LayerKind
from bridge.rules._rules import Rule


def _layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    mixer = mamba(config) if kind.mixer == "mamba" else attention(config)
    inner = _shared_mlp("mlp.", "mlp")
    if kind.channels == "sparse":
        inner = granitemoe.EXPERTS + _shared_mlp("mlp.shared_expert.", "shared_mlp")
    return mixer + inner + norms(PRE_NORMS)


def _shared_mlp(to: str, width: str) -> Rules:
    return (
        Rule(
            "shared_mlp.input_linear.weight",
            (f"{to}gate_proj.kernel", f"{to}up_proj.kernel"),
            (f"{width} embed -> embed {width}",) * 2,
        ),
        *linear(
            "shared_mlp.output_linear",
            f"{to}down_proj",
            f"embed {width} -> {width} embed",
        ),
    )


_WIDTHS = {
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "intermediate_size": 11008,
    "shared_intermediate_size": 1024,
}


def _read_widths(fields: Mapping[str, Any]) -> dict[str, Any]:
    shared, experts = fields["shared_intermediate_size"], fields["num_local_experts"]
    if not experts:  # The shared MLP is the only one.
        return {"intermediate_size": shared}
    return {
        "intermediate_size": shared,
        "moe.num_experts": experts,
        "moe.num_experts_per_tok": fields["num_experts_per_tok"],
        "moe.intermediate_size": fields["intermediate_size"],
        "moe.shared_intermediate_size": shared,
        # A softmax of the chosen logits is one of all, divided by their sum.
        "moe.norm_topk_prob": True,
        "moe.rounded_weights": True,
    }


def _write_widths(config: DecoderConfig) -> dict[str, Any]:
    moe = config.moe
    return {
        "num_local_experts": moe.num_experts if moe else 0,
        "num_experts_per_tok": moe.num_experts_per_tok if moe else 0,
        "intermediate_size": moe.intermediate_size if moe else config.intermediate_size,
        "shared_intermediate_size": config.intermediate_size,
    }


_ROPE, _POSITIONS = rope(), "position_embedding_type"


def _read_rope(fields: Mapping[str, Any]) -> dict[str, Any]:
    return _ROPE.read(fields) if fields[_POSITIONS] == "rope" else {"rope": None}


def _write_rope(config: DecoderConfig) -> dict[str, Any]:
    if config.rope is None:
        return {_POSITIONS: None}
    return {_POSITIONS: "rope", **_ROPE.write(config)}


_BASE = granitemoe.FAMILY
_LINEAR = "linear_attention"

FAMILY = Family(
    model_type="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    fields={n: f for n, f in _BASE.fields.items() if n not in _WIDTHS},
    transforms=(
        FieldTransform(
            (*_ROPE.names, _POSITIONS),
            _read_rope,
            _write_rope,
            {**_ROPE.defaults, _POSITIONS: None},
        ),
        FieldTransform(tuple(_WIDTHS), _read_widths, _write_widths, _WIDTHS),
        mixer_types(
            {_LINEAR: "mamba", "mamba": "mamba", "attention": FULL},
            lambda fields: [_LINEAR] * fields["num_hidden_layers"],
        ),
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
    constants={"learned_positions": False},
    fixed=_BASE.fixed,
    passthrough=_BASE.passthrough,
    aliases={"layers_block_type": "layer_types"},
    optional=("moe", "rope", "mamba"),
    key_mappings=(key_mapping(_layer),),
    ignore=ignore_tied_head,
)
