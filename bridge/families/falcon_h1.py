"""Falcon-H1: attention and Mamba 2 side by side in each layer, with muP multipliers.

Source: transformers `configuration_falcon_h1.py`, `modeling_falcon_h1.py`.
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
from bridge.families._mamba import NAMES, mamba, read_limit, write_limit
from bridge.models import DecoderConfig, LayerKind

_NORMS = {
    "input_layernorm": "input_layernorm",
    "pre_ff_layernorm": "pre_feedforward_layernorm",
}


def _layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    del kind
    own = attention(config) + mamba(config) + mlp(config, "feed_forward.")
    return own + norms(_NORMS)


_FACTORS = {
    "attention_in_multiplier": "attention_in",
    "attention_out_multiplier": "attention_out",
    "key_multiplier": "key",
    "ssm_in_multiplier": "mamba_in",
    "ssm_out_multiplier": "mamba_out",
}
_LISTS = {"mlp_multipliers": None, "ssm_multipliers": None}


def _read_factors(fields: Mapping[str, Any]) -> dict[str, Any]:
    of_mlp = fields["mlp_multipliers"] or (1.0, 1.0)
    of_mamba = fields["ssm_multipliers"] or (1.0,) * 5
    if len(of_mlp) != 2:
        raise ValueError(f"mlp_multipliers has {len(of_mlp)} factors of 2")
    values = {ours: fields[name] for name, ours in _FACTORS.items()}
    values |= {"gate": of_mlp[0], "down": of_mlp[1]}
    values["mamba_projections"] = tuple(of_mamba)
    return {f"multipliers.{name}": value for name, value in values.items()}


def _write_factors(config: DecoderConfig) -> dict[str, Any]:
    factors = config.multipliers
    assert factors is not None
    return {
        **{name: getattr(factors, ours) for name, ours in _FACTORS.items()},
        "mlp_multipliers": [factors.gate, factors.down],
        "ssm_multipliers": list(factors.mamba_projections),
    }


_MAMBA = {
    "mamba_d_ssm": 1024,
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "mamba_rms_norm": False,
    "mamba_norm_before_gate": True,
    "projectors_bias": False,
    "time_step_limit": (0.0, float("inf")),
}


def _read_mamba(fields: Mapping[str, Any]) -> dict[str, Any]:
    width, heads = fields["mamba_d_ssm"], fields["mamba_n_heads"]
    if width is None:
        width = fields["mamba_expand"] * fields["hidden_size"]
    head_dim = fields["mamba_d_head"]
    head_dim = width // heads if head_dim == "auto" else head_dim
    into, back = fields["mamba_proj_bias"], fields["projectors_bias"]
    wrong = []
    if heads * head_dim != width:
        wrong.append(
            f"mamba_n_heads {heads} of mamba_d_head {head_dim} are not mamba_d_ssm "
            f"{width}: set it to {heads * head_dim} in the file; transformers takes "
            "1024 where a file leaves it out, and refuses this too"
        )
    if into != back:
        wrong.append(
            f"mamba_proj_bias = {into}, projectors_bias = {back}: both projections of "
            "a mixer have a bias, or neither"
        )
    if wrong:
        raise ValueError("\n".join(wrong))
    before = fields["mamba_norm_before_gate"]
    kind = "before_gate" if before else "after_gate"
    values = {ours: fields[name] for name, ours in NAMES.items()}
    values |= {
        "head_dim": head_dim,
        "norm": kind if fields["mamba_rms_norm"] else None,
        **read_limit(fields["time_step_limit"]),
    }
    types = ("attention_mamba",) * fields["num_hidden_layers"]
    return {f"mamba.{k}": v for k, v in values.items()} | {"layer_types": types}


def _write_mamba(config: DecoderConfig) -> dict[str, Any]:
    sizes = config.mamba
    assert sizes is not None
    width = sizes.num_heads * sizes.head_dim
    return {
        **{name: getattr(sizes, ours) for name, ours in NAMES.items()},
        "mamba_d_ssm": width,
        "mamba_expand": 2,
        "mamba_rms_norm": sizes.norm is not None,
        "mamba_norm_before_gate": sizes.norm == "before_gate",
        "projectors_bias": sizes.proj_bias,
        "time_step_limit": write_limit(config),
    }


_FACTOR_DEFAULTS = {**dict.fromkeys(_FACTORS, 1.0), **_LISTS}

FAMILY = Family(
    model_type="falcon_h1",
    architecture="FalconH1ForCausalLM",
    fields={
        **SIZES,
        **tokens(1, 2, 0),
        **attention_bias(),
        "num_key_value_heads": Field(8),
        "max_position_embeddings": Field(8192),
        "rms_norm_eps": Field(1e-5, "norm_eps"),
        "mlp_bias": Field(False),
        "embedding_multiplier": Field(1.0),
        "lm_head_multiplier": Field(1.0, "logit_scale"),
    },
    transforms=(
        rope(),
        FieldTransform(
            tuple(_FACTOR_DEFAULTS), _read_factors, _write_factors, _FACTOR_DEFAULTS
        ),
        FieldTransform(tuple(_MAMBA), _read_mamba, _write_mamba, _MAMBA),
    ),
    fixed={"hidden_act": "silu", "attention_dropout": 0.0},
    passthrough={"num_logits_to_keep": 1},
    optional=("mamba", "multipliers"),
    key_mappings=(
        KeyMapping(
            outside(norm="model.final_layernorm"),
            Layers("model.layers.{layer}.", _layer),
        ),
    ),
    ignore=ignore_tied_head,
)
