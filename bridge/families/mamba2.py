"""Mamba 2 and Codestral Mamba: a mixer in each layer, and nothing else.

Source: transformers `configuration_mamba2.py`, `modeling_mamba2.py`.
"""

import math
from collections.abc import Mapping
from typing import Any

from bridge.families._blocks import Rules, ignore_tied_head, norms, outside
from bridge.families._family import Family, Field, KeyMapping, Layers
from bridge.families._field_transform import FieldTransform
from bridge.families._fields import tokens
from bridge.families._mamba import mamba, read_limit, write_limit
from bridge.models import DecoderConfig, LayerKind


def _layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    del kind
    return mamba(config, "mixer.") + norms({"norm": "input_layernorm"})


_SIZES = {
    "hidden_size": 4096,
    "num_heads": 128,
    "head_dim": 64,
    "expand": 2,
    "num_hidden_layers": 64,
}


def _read_sizes(fields: Mapping[str, Any]) -> dict[str, Any]:
    width, heads = fields["hidden_size"], fields["num_heads"]
    head_dim, layers = fields["head_dim"], fields["num_hidden_layers"]
    if heads * head_dim != fields["expand"] * width:
        raise ValueError(
            f"num_heads {heads} of head_dim {head_dim} are not expand "
            f"{fields['expand']} times hidden_size {width}"
        )
    return {
        "hidden_size": width,
        # There are neither MLPs nor heads of attention.
        "intermediate_size": width,
        "num_attention_heads": 1,
        "num_hidden_layers": layers,
        "layer_types": ("mamba",) * layers,
        "mixer_only_layers": tuple(range(layers)),
        "mamba.num_heads": heads,
        "mamba.head_dim": head_dim,
    }


def _write_sizes(config: DecoderConfig) -> dict[str, Any]:
    sizes = config.mamba
    assert sizes is not None
    return {
        "hidden_size": config.hidden_size,
        "num_heads": sizes.num_heads,
        "head_dim": sizes.head_dim,
        "expand": sizes.num_heads * sizes.head_dim // config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
    }


_LIMIT = "time_step_limit"
_BOUNDS = FieldTransform(
    (_LIMIT,),
    lambda fields: {f"mamba.{k}": v for k, v in read_limit(fields[_LIMIT]).items()},
    lambda config: {_LIMIT: write_limit(config)},
    {_LIMIT: (0.0, float("inf"))},
)

# Rank of Mamba 1's projection of time steps. Mamba 2 has no such projection, and its
# config class computes the field all the same: exports say what it computes.
_RANK = FieldTransform(
    ("time_step_rank",),
    lambda _: {},
    lambda config: {"time_step_rank": math.ceil(config.hidden_size / 16)},
    {"time_step_rank": "auto"},
)

FAMILY = Family(
    model_type="mamba2",
    architecture="Mamba2ForCausalLM",
    fields={
        **tokens(0, 2, 1),
        "vocab_size": Field(32768),
        "state_size": Field(128, "mamba.state_size"),
        "n_groups": Field(8, "mamba.num_groups"),
        "conv_kernel": Field(4, "mamba.kernel_size"),
        "use_conv_bias": Field(True, "mamba.conv_bias"),
        "use_bias": Field(False, "mamba.proj_bias"),
        "chunk_size": Field(256, "mamba.chunk_size"),
        "layer_norm_epsilon": Field(1e-5, "norm_eps"),
        "residual_in_fp32": Field(True),
        "initializer_range": Field(0.1),
        "tie_word_embeddings": Field(False),
    },
    transforms=(
        FieldTransform(tuple(_SIZES), _read_sizes, _write_sizes, _SIZES),
        _BOUNDS,
        _RANK,
    ),
    constants={"rope": None, "learned_positions": False},
    fixed={"hidden_act": "silu"},
    # How weights are initialized.
    passthrough={
        "time_step_min": 0.001,
        "time_step_max": 0.1,
        "time_step_floor": 1e-4,
        "rescale_prenorm_residual": False,
    },
    key_mappings=(
        KeyMapping(
            outside("backbone.embeddings", "backbone.norm_f"),
            Layers("backbone.layers.{layer}.", _layer),
        ),
    ),
    ignore=ignore_tied_head,
)
