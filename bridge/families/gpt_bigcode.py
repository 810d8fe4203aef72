"""StarCoder 1, SantaCoder and WizardCoder: GPT-2 with one head of keys for all.

Source: transformers `configuration_gpt_bigcode.py`, `modeling_gpt_bigcode.py`.
"""

from collections.abc import Mapping
from typing import Any

from bridge.families import _gpt
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
from bridge.families._fused import fused_qkv
from bridge.models import DecoderConfig, LayerKind
from bridge.rules._rules import Rule

_NORMS = {"ln_1": "input_layernorm", "ln_2": "pre_feedforward_layernorm"}


def _layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    del kind
    return (
        *fused_qkv(config, "attn.c_attn"),
        *attention_out(config, "attn.c_proj"),
        *ungated_mlp(config, "mlp.c_fc", "mlp.c_proj"),
        *norms(_NORMS, bias=True),
    )


def _outside(config: DecoderConfig) -> Rules:
    positions = Rule(
        "transformer.wpe.weight",
        "embed_positions.embedding",
        "positions embed -> positions embed",
    )
    return (*outside("transformer.wte", "transformer.ln_f")(config), positions)


def _read_heads(fields: Mapping[str, Any]) -> dict[str, Any]:
    heads, given = 1 if fields["multi_query"] else fields["n_head"], fields[_DERIVED]
    if given not in (None, heads):
        raise ValueError(f"{_DERIVED} = {given!r}: multi_query says {heads}")
    return {_DERIVED: heads}


_DERIVED = "num_key_value_heads"
_HEADS = FieldTransform(
    ("multi_query", _DERIVED),
    _read_heads,
    lambda config: {"multi_query": config.num_key_value_heads == 1},
    {"multi_query": True, _DERIVED: None},
)


def _ignore(config: DecoderConfig) -> tuple[str, ...]:
    masks = tuple(f"transformer.h.{{layer}}.attn.{n}" for n in ("bias", "masked_bias"))
    return masks + ignore_tied_head(config)


FAMILY = Family(
    model_type="gpt_bigcode",
    architecture="GPTBigCodeForCausalLM",
    fields={
        **tokens(50256, 50256),
        **_gpt.SIZES,
        "vocab_size": Field(50257),
        "activation_function": Field("gelu_pytorch_tanh", "hidden_act"),
    },
    transforms=(_gpt.INNER, _HEADS),
    constants={"rope": None, **_gpt.LAYERS},
    fixed={"scale_attn_weights": True, "add_cross_attention": False},
    # Of float32 scores: whether softmax and scaling are in float32, as they are here.
    passthrough={
        **_gpt.DROPOUT,
        "attention_softmax_in_fp32": True,
        "scale_attention_softmax_in_fp32": True,
    },
    key_mappings=(KeyMapping(_outside, Layers("transformer.h.{layer}.", _layer)),),
    ignore=_ignore,
)
