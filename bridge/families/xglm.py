"""XGLM: a table of sines as positions, biases everywhere.

Source: transformers `configuration_xglm.py`, `modeling_xglm.py`.
"""

from collections.abc import Mapping
from typing import Any

from bridge.families import _gpt
from bridge.families._blocks import ignore_tied_head, outside
from bridge.families._family import Family, Field, KeyMapping, Layers
from bridge.families._field_transform import FieldTransform
from bridge.families._fields import tokens
from bridge.families.opt import layer
from bridge.models import DecoderConfig

_OFFSET = 2
_PAD = "pad_token_id"


def _read_pad(fields: Mapping[str, Any]) -> dict[str, Any]:
    pad = fields[_PAD]
    if pad is not None and not 0 <= pad < _OFFSET:
        row = pad if pad >= 0 else fields["max_position_embeddings"] + _OFFSET + pad
        raise ValueError(
            f"{_PAD} = {pad}: transformers zeroes the row {row} of the table, which "
            f"is position {row - _OFFSET}, and is not modelled; set {_PAD} to 1 or null"
        )
    return {_PAD: pad}


_PADDING = FieldTransform(
    (_PAD,), _read_pad, lambda config: {_PAD: config.pad_token_id}, {_PAD: 1}
)


def _ignore(config: DecoderConfig) -> tuple[str, ...]:
    """The table of positions, which old files hold, and a tied head."""
    table = "embed_positions.weights"
    return (table, f"model.{table}", *ignore_tied_head(config))


FAMILY = Family(
    model_type="xglm",
    architecture="XGLMForCausalLM",
    fields={
        "bos_token_id": Field(0),
        "eos_token_id": tokens(0, 2)["eos_token_id"],
        "vocab_size": Field(256008),
        "d_model": Field(1024, "hidden_size", aliases=("hidden_size",)),
        "num_layers": Field(24, "num_hidden_layers", aliases=("num_hidden_layers",)),
        "attention_heads": Field(
            16, "num_attention_heads", aliases=("num_attention_heads",)
        ),
        "ffn_dim": Field(4096, "intermediate_size"),
        "max_position_embeddings": Field(2048),
        "activation_function": Field("gelu", "hidden_act"),
        "tie_word_embeddings": Field(True),
    },
    transforms=(_PADDING, _gpt.scaled_embeddings("d_model")),
    constants={
        "rope": None,
        "learned_positions": False,
        "sinusoidal_positions": True,
        "position_offset": _OFFSET,
        "norm_eps": 1e-5,
        **_gpt.LAYERS,
    },
    fixed={"add_cross_attention": False},
    # How weights are initialized, rates of dropout, and how sequences to sequences
    # would begin.
    passthrough={
        "init_std": 0.02,
        "dropout": 0.1,
        "attention_dropout": 0.1,
        "activation_dropout": 0.0,
        "layerdrop": 0.0,
        "decoder_start_token_id": 2,
    },
    key_mappings=(
        KeyMapping(
            outside(norm="model.layer_norm"), Layers("model.layers.{layer}.", layer)
        ),
    ),
    ignore=_ignore,
)
