"""JetMoE: experts of attention, each with queries of its own, and of MLPs.

Statistics of routers, and so losses that balance them, are those of MLPs alone.

Source: transformers `configuration_jetmoe.py`, `modeling_jetmoe.py`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from bridge.families import granitemoe
from bridge.families._blocks import (
    PRE_NORMS,
    Rules,
    ignore_tied_head,
    key_mapping,
    linear,
    norms,
)
from bridge.families._family import Family, Field
from bridge.families._field_transform import FieldTransform
from bridge.families._fields import SIZES, tokens
from bridge.families._hf_rope import rope
from bridge.models import DecoderConfig, LayerKind
from bridge.rules._rules import Rule

_AT, _TO = "self_attention.experts.", "self_attn."
_OUT = "embed -> embed"
_EXPERTS: Rules = tuple(
    dataclasses.replace(rule, source=rule.sources[0].replace("block_sparse_moe", "mlp"))
    for rule in granitemoe.EXPERTS
)
_EACH, _HEADS = "attention_experts", "(kv_heads head_dim)"
_ATTENTION: Rules = (
    *linear(
        f"{_AT}router.layer",
        f"{_TO}router.gate",
        f"{_EACH} embed -> embed {_EACH}",
    ),
    Rule(
        f"{_AT}input_linear.weight",
        f"{_TO}q_experts",
        f"{_EACH} {_HEADS} embed -> {_EACH} embed kv_heads head_dim",
    ),
    Rule(
        f"{_AT}output_linear.weight",
        f"{_TO}o_experts",
        f"{_EACH} embed {_HEADS} -> {_EACH} kv_heads head_dim embed",
    ),
    Rule(f"{_AT}bias", f"{_TO}o_bias", _OUT),
    Rule(
        "self_attention.kv_proj.weight",
        (f"{_TO}k_proj.kernel", f"{_TO}v_proj.kernel"),
        (f"{_HEADS} embed -> embed kv_heads head_dim",) * 2,
    ),
)


def _layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    del config, kind
    bias = Rule("mlp.bias", "mlp.output_bias", _OUT)
    return (*_ATTENTION, *_EXPERTS, bias, *norms(PRE_NORMS))


_QUERIES, _KEYS, _CHOSEN = (
    *("num_attention_heads", "num_key_value_heads", "num_experts_per_tok"),
)
_HEAD_COUNTS = {_QUERIES: None, _KEYS: 16, _CHOSEN: 2}


def _read_heads(fields: Mapping[str, Any]) -> dict[str, Any]:
    heads = fields[_KEYS] * fields[_CHOSEN]
    if fields[_QUERIES] not in (None, heads):
        raise ValueError(
            f"{_QUERIES} = {fields[_QUERIES]}: transformers takes {_KEYS} "
            f"{fields[_KEYS]} times {_CHOSEN} {fields[_CHOSEN]}, {heads}; set it to "
            "that, or remove it"
        )
    return {
        _QUERIES: heads,
        _KEYS: fields[_KEYS],
        f"moe.{_CHOSEN}": fields[_CHOSEN],
        f"attention_experts.{_CHOSEN}": fields[_CHOSEN],
    }


def _write_heads(config: DecoderConfig) -> dict[str, Any]:
    experts = config.attention_experts
    assert experts is not None
    return {
        _QUERIES: config.num_attention_heads,
        _KEYS: config.num_key_value_heads,
        _CHOSEN: experts.num_experts_per_tok,
    }


_OTHERS = {_QUERIES, _KEYS, "head_dim"}

FAMILY = Family(
    model_type="jetmoe",
    architecture="JetMoeForCausalLM",
    fields={
        **{name: f for name, f in SIZES.items() if name not in _OTHERS},
        **tokens(1, 2),
        "kv_channels": Field(128, "head_dim", ("head_dim",)),
        "intermediate_size": Field(
            5632, ("intermediate_size", "moe.intermediate_size")
        ),
        "num_local_experts": Field(
            8,
            ("moe.num_experts", "attention_experts.num_experts"),
            ("num_experts", "n_routed_experts"),
        ),
        "max_position_embeddings": Field(4096),
        "activation_function": Field("silu", "hidden_act"),
        "rms_norm_eps": Field(1e-6, "final_norm_eps"),
        "initializer_range": Field(0.01),
        "tie_word_embeddings": Field(True),
    },
    transforms=(
        rope(),
        FieldTransform(tuple(_HEAD_COUNTS), _read_heads, _write_heads, _HEAD_COUNTS),
    ),
    # The epsilon of layers is none of the file.
    constants={
        "norm_eps": 1e-6,
        "attention_out_bias": True,
        "moe.output_bias": True,
        "moe.norm_topk_prob": True,
        "moe.rounded_weights": True,
    },
    passthrough={
        "output_router_logits": False,
        "aux_loss_coef": 0.01,
        "attention_dropout": 0.0,
    },
    key_mappings=(key_mapping(_layer),),
    ignore=ignore_tied_head,
)
