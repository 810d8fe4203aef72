"""MPT: ALiBi, layer norms without biases, an MLP without a gate.

transformers computes MLPs of four times the width, and adds no biases, whatever the
file says of either; models that say otherwise are refused. It takes 8 for
`alibi_bias_max` too; a file that says another is computed as the release's code does.

Source: transformers `configuration_mpt.py`, `modeling_mpt.py`.
"""

from collections.abc import Mapping
from typing import Any

from bridge.families._blocks import (
    Rules,
    attention_out,
    ignore_tied_head,
    norms,
    outside,
    ungated_mlp,
)
from bridge.families._family import Family, Field, KeyMapping, Layers
from bridge.families._field_transform import FieldTransform
from bridge.families._fields import tokens
from bridge.families._transformers_fields import COMMON
from bridge.models import DecoderConfig, LayerKind
from bridge.rules._rules import Rule

_NORMS = {"norm_1": "input_layernorm", "norm_2": "pre_feedforward_layernorm"}


def _layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    del kind
    return (
        Rule(
            "attn.Wqkv.weight",
            tuple(f"self_attn.{name}_proj.kernel" for name in "qkv"),
            ("(heads head_dim) embed -> embed heads head_dim",) * 3,
        ),
        *attention_out(config, "attn.out_proj"),
        *ungated_mlp(config, "ffn.up_proj", "ffn.down_proj"),
        *norms(_NORMS),
    )


_ATTENTION = "attn_config"
# Of `attn_config`, what is read, with transformers' defaults.
_READ = {"clip_qkv": None, "softmax_scale": None, "alibi_bias_max": 8}
# What of it has one value that is modelled.
_FIXED = {
    "attn_type": "multihead_attention",
    "prefix_lm": False,
    "qk_ln": False,
    "attn_uses_sequence_id": False,
    "alibi": True,
}
# What of it changes no logit, besides what any config of transformers has.
_INERT = ("attn_pdrop", "attn_impl")


def _read_attention(fields: Mapping[str, Any]) -> dict[str, Any]:
    given = fields[_ATTENTION] or {}
    if not isinstance(given, Mapping):
        raise ValueError(f"{_ATTENTION} = {given!r} is not an object")
    wrong = [
        f"{_ATTENTION}.{name} = {given[name]!r}: only {value!r} is modelled"
        for name, value in _FIXED.items()
        if given.get(name, value) != value
    ]
    known = {*_READ, *_FIXED, *_INERT, *COMMON}
    wrong += [
        f"{_ATTENTION}.{name} = {value!r}: this field is not modelled"
        for name, value in given.items()
        if name not in known and value not in (None, False)
    ]
    if wrong:
        raise ValueError("\n".join(wrong))
    values = {name: given.get(name, default) for name, default in _READ.items()}
    return {
        "alibi_bias_max": float(values["alibi_bias_max"]),
        "clip_qkv": values["clip_qkv"] or None,
        "attention_multiplier": values["softmax_scale"],
    }


def _write_attention(config: DecoderConfig) -> dict[str, Any]:
    largest = config.alibi_bias_max
    assert largest is not None
    read = {
        "clip_qkv": config.clip_qkv,
        "softmax_scale": config.attention_multiplier,
        # An integer in all published files; other values are written as they are.
        "alibi_bias_max": int(largest) if largest.is_integer() else largest,
    }
    return {_ATTENTION: {**_FIXED, **read}}


_WIDTHS = {"d_model": 2048, "expansion_ratio": 4}


def _read_width(fields: Mapping[str, Any]) -> dict[str, Any]:
    width, ratio = (fields[name] for name in _WIDTHS)
    if ratio != 4:
        raise ValueError(f"expansion_ratio = {ratio!r}: transformers computes with 4")
    return {"hidden_size": width, "intermediate_size": 4 * width}


FAMILY = Family(
    model_type="mpt",
    architecture="MptForCausalLM",
    also_architectures=("MPTForCausalLM",),
    fields={
        **tokens(None, None),
        "vocab_size": Field(50368),
        "n_layers": Field(24, "num_hidden_layers", ("num_hidden_layers",)),
        "n_heads": Field(16, "num_attention_heads", ("num_attention_heads",)),
        "max_seq_len": Field(2048, "max_position_embeddings"),
        "layer_norm_epsilon": Field(1e-5, "norm_eps"),
        "initializer_range": Field(0.02),
        "tie_word_embeddings": Field(True),
    },
    transforms=(
        FieldTransform(
            tuple(_WIDTHS),
            _read_width,
            lambda config: {"d_model": config.hidden_size, "expansion_ratio": 4},
            _WIDTHS,
        ),
        FieldTransform(
            (_ATTENTION,), _read_attention, _write_attention, {_ATTENTION: None}
        ),
    ),
    constants={
        "rope": None,
        "norm": "layer",
        "hidden_act": "gelu",
        "gated_mlp": False,
    },
    fixed={"no_bias": True, "logit_scale": None},
    # These change no logit: transformers builds no learned positions beside ALiBi.
    passthrough={
        "learned_pos_emb": True,
        "emb_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "init_device": "cpu",
        "embedding_fraction": 1.0,
        "norm_type": "low_precision_layernorm",
    },
    aliases={"hidden_size": "d_model"},
    key_mappings=(
        KeyMapping(
            outside("transformer.wte", "transformer.norm_f"),
            Layers("transformer.blocks.{layer}.", _layer),
        ),
    ),
    ignore=ignore_tied_head,
)
