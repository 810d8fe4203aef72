"""Mamba 1: a mixer in each layer, and nothing else.

Source: transformers `configuration_mamba.py`, `modeling_mamba.py`.
"""

import math
from collections.abc import Mapping
from typing import Any

from bridge.families._blocks import Rules, ignore_tied_head, norms, outside
from bridge.families._family import Family, Field, KeyMapping, Layers
from bridge.families._field_transform import FieldTransform
from bridge.families._fields import tokens
from bridge.families._mamba1 import mamba1
from bridge.models import DecoderConfig, LayerKind


def _layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    del kind
    return mamba1(config, "mixer.") + norms({"norm": "input_layernorm"})


_SIZES = {
    "hidden_size": 768,
    "num_hidden_layers": 32,
    "expand": 2,
    "time_step_rank": "auto",
    # transformers derives it.
    "intermediate_size": None,
}


def _read_sizes(fields: Mapping[str, Any]) -> dict[str, Any]:
    width, layers = fields["hidden_size"], fields["num_hidden_layers"]
    rank, channels = fields["time_step_rank"], int(fields["expand"] * width)
    if fields["intermediate_size"] not in (None, channels):
        raise ValueError(
            f"intermediate_size {fields['intermediate_size']}: transformers takes "
            f"expand {fields['expand']} times hidden_size {width}, {channels}"
        )
    return {
        "hidden_size": width,
        # There are neither MLPs nor heads of attention.
        "intermediate_size": width,
        "num_attention_heads": 1,
        "num_hidden_layers": layers,
        "layer_types": ("mamba1",) * layers,
        "mixer_only_layers": tuple(range(layers)),
        "mamba1.num_channels": channels,
        "mamba1.time_step_rank": math.ceil(width / 16) if rank == "auto" else rank,
    }


def _write_sizes(config: DecoderConfig) -> dict[str, Any]:
    sizes = config.mamba1
    assert sizes is not None
    return {
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "expand": sizes.num_channels // config.hidden_size,
        "time_step_rank": sizes.time_step_rank,
        "intermediate_size": sizes.num_channels,
    }


FAMILY = Family(
    model_type="mamba",
    architecture="MambaForCausalLM",
    fields={
        **tokens(0, 0, 0),
        "vocab_size": Field(50280),
        "state_size": Field(16, "mamba1.state_size"),
        "conv_kernel": Field(4, "mamba1.kernel_size"),
        "use_conv_bias": Field(True, "mamba1.conv_bias"),
        "use_bias": Field(False, "mamba1.proj_bias"),
        "layer_norm_epsilon": Field(1e-5, "norm_eps"),
        "residual_in_fp32": Field(True),
        "initializer_range": Field(0.1),
        "tie_word_embeddings": Field(True),
    },
    transforms=(FieldTransform(tuple(_SIZES), _read_sizes, _write_sizes, _SIZES),),
    constants={"rope": None, "learned_positions": False},
    fixed={"hidden_act": "silu"},
    # How weights are initialized, and which kernel computes a mixer.
    passthrough={
        "time_step_scale": 1.0,
        "time_step_min": 0.001,
        "time_step_max": 0.1,
        "time_step_init_scheme": "random",
        "time_step_floor": 1e-4,
        "rescale_prenorm_residual": False,
        "use_mambapy": False,
        "use_associative_scan": True,
    },
    key_mappings=(
        KeyMapping(
            outside("backbone.embeddings", "backbone.norm_f"),
            Layers("backbone.layers.{layer}.", _layer),
        ),
    ),
    ignore=ignore_tied_head,
)
