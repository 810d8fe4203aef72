"""Zamba: Mamba 1 mixers with heads, and a block of attention that layers share.

Source: transformers `configuration_zamba.py`, `modeling_zamba.py`.
"""

import math
from collections.abc import Mapping
from typing import Any

from bridge.families._blocks import (
    Rules,
    ignore_tied_head,
    linear,
    mlp,
    norm,
    norms,
    outside,
)
from bridge.families._family import Family, Field, KeyMapping, Layers
from bridge.families._field_transform import FieldTransform
from bridge.families._fields import SIZES, tokens
from bridge.families._shared_blocks import (
    HYBRID,
    LINEAR,
    TIED,
    TYPES,
    block_attention,
    block_copies,
    block_prefix,
    hybrid_layers,
    tied_alone,
    types_of,
)
from bridge.models import DecoderConfig, LayerKind
from bridge.rules._rules import Rule

Fields = Mapping[str, Any]
_NAME = "shared_transf"
_BY_HEAD = "channel_heads {0} channel_dim -> channel_heads channel_dim {0}"
_BACK = "channel_heads channel_dim step_rank -> channel_heads step_rank channel_dim"
_FLAT = "channel_heads channel_dim{0} -> (channel_heads channel_dim){0}"


def _mamba(config: DecoderConfig, at: str) -> Rules:
    """A mixer whose rows into it alternate between input and gate of a channel."""
    sizes, to = config.mamba1, "mamba1."
    assert sizes is not None
    biased, own = sizes.proj_bias, "channels -> channels"
    of_step, of_state = _BY_HEAD.format("step_rank"), _BY_HEAD.format("channel_state")
    return (
        *linear(
            f"{at}in_proj",
            f"{to}xz_proj",
            "(channels two) embed -> embed channels two",
            "(channels two) -> channels two" if biased else None,
        ),
        *linear(
            f"{at}conv1d",
            f"{to}x_conv",
            "channels one conv_kernel -> channels (one conv_kernel)",
            own if sizes.conv_bias else None,
        ),
        Rule(
            f"{at}x_proj_weight",
            tuple(f"{to}{name}_proj.kernel" for name in ("step", "b", "c")),
            (of_step, of_state, of_state),
            dim=1,
        ),
        Rule(f"{at}dt_proj_weight", f"{to}dt_proj.kernel", _BACK),
        Rule(
            f"{at}dt_proj_bias",
            f"{to}dt_proj.bias",
            "channel_heads channel_dim -> channel_heads channel_dim",
        ),
        Rule(f"{at}A_log", f"{to}a_log", _FLAT.format(" channel_state")),
        Rule(f"{at}D", f"{to}skip", _FLAT.format("")),
        *linear(
            f"{at}out_proj",
            f"{to}o_proj",
            "embed channels -> channels embed",
            "embed -> embed" if biased else None,
        ),
    )


def _layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    if kind.shared_block is None:
        own = {"input_layernorm": "input_layernorm"}
        return _mamba(config, "mamba.") + norms(own)
    return (
        *_mamba(config, "mamba_decoder.mamba."),
        norm("mamba_decoder.input_layernorm", "input_layernorm"),
        *linear("linear", "shared_use.out_proj", "embed_out embed -> embed embed_out"),
    )


def _outer(config: DecoderConfig) -> Rules:
    blocks = config.shared_blocks
    assert blocks is not None
    at, to = block_prefix(blocks, 0, _NAME), "shared_blocks.0."
    inner = mlp(config, f"{at}feed_forward.", f"{to}mlp.")
    outer = outside(norm="model.final_layernorm")(config)
    return outer + block_attention(at, to) + inner


_PERIOD, _OFFSET = "attn_layer_period", "attn_layer_offset"
_BLOCKS = {TYPES: None, _PERIOD: 6, _OFFSET: 4}


def _read_blocks(fields: Fields) -> dict[str, Any]:
    count, given = fields["num_hidden_layers"], fields[TYPES]
    if given is None:
        period, offset = fields[_PERIOD], fields[_OFFSET]
        if period < 1:
            raise ValueError(f"{_PERIOD} {period}: at least 1")
        later = (i % period == offset for i in range(count - 3))
        given = [HYBRID if runs else LINEAR for runs in (False, False, True, *later)]
    layers, wrong = hybrid_layers(given, "no layer runs the block")
    if wrong:
        raise ValueError("\n".join(wrong))
    return {
        "layer_types": ("mamba1",) * len(given),
        "mixer_only_layers": tuple(range(count)),
        "shared_blocks.num_blocks": 1,
        "shared_blocks.layers": layers,
    }


def _write_blocks(config: DecoderConfig) -> dict[str, Any]:
    return {TYPES: types_of(config)}


_BOTH, _WIDTH = "attention_hidden_size", "attention_head_dim"
_HEADS = {"num_key_value_heads": 16, _BOTH: None, _WIDTH: None}


def _read_heads(fields: Fields) -> dict[str, Any]:
    both, heads = 2 * fields["hidden_size"], fields["num_attention_heads"]
    if fields[_BOTH] not in (None, 0, both):
        raise ValueError(
            f"{_BOTH} = {fields[_BOTH]!r}: a block reads two streams of hidden_size "
            f"{fields['hidden_size']}; set it to {both}, or remove it"
        )
    width = fields[_WIDTH] or both // heads
    return {
        "num_key_value_heads": fields["num_key_value_heads"],
        "head_dim": width,
        "query_pre_attn_scalar": width / 2,
    }


def _write_heads(config: DecoderConfig) -> dict[str, Any]:
    return {
        "num_key_value_heads": config.num_key_value_heads,
        _BOTH: 2 * config.hidden_size,
        _WIDTH: config.head_dim,
    }


_RANK, _EXPAND = "mamba_dt_rank", "mamba_expand"
_OURS = {
    "n_mamba_heads": "num_heads",
    "mamba_d_state": "state_size",
    "mamba_d_conv": "kernel_size",
    "mamba_conv_bias": "conv_bias",
    "mamba_proj_bias": "proj_bias",
}
_MAMBA = {
    "n_mamba_heads": 2,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    _RANK: "auto",
    _EXPAND: 2,
}


def _read_mamba(fields: Fields) -> dict[str, Any]:
    width, rank = fields["hidden_size"], fields[_RANK]
    values = {ours: fields[name] for name, ours in _OURS.items()}
    values["num_channels"] = fields[_EXPAND] * width
    values["time_step_rank"] = math.ceil(width / 16) if rank == "auto" else rank
    return {f"mamba1.{name}": value for name, value in values.items()}


def _write_mamba(config: DecoderConfig) -> dict[str, Any]:
    sizes = config.mamba1
    assert sizes is not None
    return {
        **{name: getattr(sizes, ours) for name, ours in _OURS.items()},
        _RANK: sizes.time_step_rank,
        _EXPAND: sizes.num_channels // config.hidden_size,
    }


_OTHERS = {*_HEADS, TIED, "head_dim"}

FAMILY = Family(
    model_type="zamba",
    architecture="ZambaForCausalLM",
    fields={
        **{name: f for name, f in SIZES.items() if name not in _OTHERS},
        **tokens(1, 2, 0),
        "max_position_embeddings": Field(4096),
        "hidden_act": Field("gelu"),
        "rms_norm_eps": Field(1e-5, "norm_eps"),
    },
    transforms=(
        FieldTransform(tuple(_BLOCKS), _read_blocks, _write_blocks, _BLOCKS),
        tied_alone(TYPES),
        FieldTransform(tuple(_HEADS), _read_heads, _write_heads, _HEADS),
        FieldTransform(tuple(_MAMBA), _read_mamba, _write_mamba, _MAMBA),
    ),
    constants={"rope": None, "learned_positions": False, "mamba1.fused_gate": True},
    fixed={"attention_dropout": 0.0, "hidden_mamba_act": "silu"},
    # How weights are initialized, which kernel computes a mixer, and what old code
    # kept of logits.
    passthrough={
        "num_logits_to_keep": 1,
        "time_step_floor": 1e-4,
        "time_step_max": 0.1,
        "time_step_min": 0.001,
        "use_associative_scan": True,
        "use_mamba_kernels": True,
    },
    aliases={"layer_types": TYPES, "head_dim": _WIDTH},
    optional=("mamba1", "shared_blocks"),
    key_mappings=(KeyMapping(_outer, Layers("model.layers.{layer}.", _layer)),),
    ignore=ignore_tied_head,
    copies=block_copies(_NAME),
)
