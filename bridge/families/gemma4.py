"""Gemma 4, the text model: full layers have wider heads, and may have experts.

Of the models that also see and hear, the text part is read. Those whose layers have
embeddings of their own, or share keys and values (E2B, E4B), are refused.

Source: transformers `configuration_gemma4.py`, `modeling_gemma4.py`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from bridge.families import _gemma
from bridge.families._blocks import (
    Rules,
    attention,
    ignore_tied_head,
    key_mapping,
    mlp,
    norm,
    norms,
    router,
)
from bridge.families._family import Family, Field
from bridge.families._field_transform import FieldTransform
from bridge.families._fields import SIZES, attention_bias, tokens
from bridge.families._hf_rope import rope_by_layer_type
from bridge.families._layer_types import FULL, layer_types
from bridge.models import DecoderConfig, LayerKind
from bridge.rules._rules import Rule

_EXPERTS = (
    *router("router.proj"),
    Rule("router.per_expert_scale", "mlp.router.expert_scale", "experts -> experts"),
    Rule("router.scale", "mlp.norms.router_scale", "embed -> embed"),
    Rule(
        "experts.gate_up_proj",
        "mlp.experts.gate_up_proj",
        "experts (two expert_mlp) embed -> experts embed two expert_mlp",
    ),
    Rule(
        "experts.down_proj",
        "mlp.experts.down_proj",
        "experts embed expert_mlp -> experts expert_mlp embed",
    ),
    norm("pre_feedforward_layernorm_2", "mlp.norms.input"),
    norm("post_feedforward_layernorm_1", "mlp.norms.shared"),
    norm("post_feedforward_layernorm_2", "mlp.norms.output"),
)


def _attention(config: DecoderConfig, kind: LayerKind) -> Rules:
    """Rules of attention, with the sizes of a kind and without the values it lacks."""
    rules, full = attention(config), config.full_attention
    if not kind.is_full or full is None:
        return rules
    if full.shared_key_value:
        rules = tuple(r for r in rules if ".v_proj." not in r.destinations[0])
    return tuple(dataclasses.replace(r, layout=_of_full(r.layout)) for r in rules)


def _of_full(layout: Any) -> str:
    words = str(layout).replace("v_head_dim", "head_dim")
    return words.replace("head_dim", "full_head_dim").replace(
        "kv_heads", "full_kv_heads"
    )


def _layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    is_sparse = kind.channels == "sparse"
    dense = mlp(config, "mlp.", "mlp.shared_expert.", "shared_mlp")
    return (
        *_attention(config, kind),
        *(dense + _EXPERTS if is_sparse else mlp(config)),
        *norms({name: name for name in _gemma.NORMS}),
        Rule("layer_scalar", "layer_scalar", "one -> one"),
    )


def _read_types(fields: Mapping[str, Any]) -> dict[str, Any]:
    types = layer_types(6).read(fields)["layer_types"]
    return {"layer_types": (*types[:-1], FULL)}  # the last, whatever the file says


_SIZES = {
    "global_head_dim": 512,
    "num_global_key_value_heads": None,
    "attention_k_eq_v": False,
    "per_layer_config": None,
}


def _read_sizes(fields: Mapping[str, Any]) -> dict[str, Any]:
    shared, heads = fields["attention_k_eq_v"], fields["num_key_value_heads"]
    own = fields["num_global_key_value_heads"] if shared else None
    width = fields["global_head_dim"]
    if (given := fields["per_layer_config"]) is not None:
        width, own = _of_each(given, fields)
    return {
        "full_attention.head_dim": width,
        "full_attention.num_key_value_heads": heads if own is None else own,
        "full_attention.shared_key_value": shared,
    }


def _of_each(
    given: Mapping[Any, Any], fields: Mapping[str, Any]
) -> tuple[int, int | None]:
    """Returns what files of transformers 5 say of each full layer: all the same."""
    types = _read_types(fields)["layer_types"]
    full = {str(layer) for layer, kind in enumerate(types) if kind == FULL}
    sizes = {tuple(sorted(each.items())) for each in given.values()}
    known = {"head_dim", "num_key_value_heads"}
    if set(map(str, given)) != full or len(sizes) != 1 or set(dict(*sizes)) - known:
        raise ValueError(
            f"per_layer_config = {given!r}: the same head_dim and num_key_value_heads "
            f"for each of the full layers {', '.join(sorted(full, key=int))}"
        )
    each = dict(*sizes)
    return each.get("head_dim", fields["head_dim"]), each.get("num_key_value_heads")


def _write_sizes(config: DecoderConfig) -> dict[str, Any]:
    full = config.full_attention
    assert full is not None
    return {
        "global_head_dim": full.head_dim,
        "num_global_key_value_heads": full.num_key_value_heads,
        "attention_k_eq_v": full.shared_key_value,
    }


_MOE = {
    "enable_moe_block": False,
    "num_experts": None,
    "top_k_experts": None,
    "moe_intermediate_size": None,
}


def _read_moe(fields: Mapping[str, Any]) -> dict[str, Any]:
    if not fields["enable_moe_block"]:
        return {}
    return {
        "moe.num_experts": fields["num_experts"],
        "moe.num_experts_per_tok": fields["top_k_experts"],
        "moe.intermediate_size": fields["moe_intermediate_size"],
        "moe.shared_intermediate_size": fields["intermediate_size"],
        "moe.norm_topk_prob": True,
        "moe.own_norms": True,
        "moe.expert_scale": True,
    }


def _write_moe(config: DecoderConfig) -> dict[str, Any]:
    if (moe := config.moe) is None:
        return _MOE
    sizes = (moe.num_experts, moe.num_experts_per_tok, moe.intermediate_size)
    return dict(zip(_MOE, (True, *sizes), strict=True))


_UNMODELLED = {
    "hidden_size_per_layer_input": (256, (0, None), "layers have no embeddings"),
    "num_kv_shared_layers": (0, (0, None), "layers share no keys and values"),
    "use_bidirectional_attention": (None, (None, "vision"), "texts are causal"),
}


def _read_unmodelled(fields: Mapping[str, Any]) -> dict[str, Any]:
    wrong = [
        f"{name} = {fields[name]!r}: only {modelled[0]!r} is modelled, {why}"
        for name, (_, modelled, why) in _UNMODELLED.items()
        if fields[name] not in modelled
    ]
    if wrong:
        raise ValueError("\n".join(wrong))
    return {}


_WITHOUT = {name: default for name, (default, _, _) in _UNMODELLED.items()}

FAMILY = Family(
    model_type="gemma4_text",
    architecture="Gemma4ForCausalLM",
    fields={
        **SIZES,
        **tokens(2, 1, 0),
        **attention_bias(),
        "num_key_value_heads": Field(4),
        "head_dim": Field(256),
        "max_position_embeddings": Field(131072),
        "tie_word_embeddings": Field(True),
        "rms_norm_eps": Field(1e-6, "norm_eps"),
        "sliding_window": Field(512),
        "final_logit_softcapping": Field(None),
    },
    transforms=(
        rope_by_layer_type(
            1e6,
            10000.0,
            default={
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1e6,
            },
        ),
        FieldTransform(
            ("layer_types",),
            _read_types,
            lambda config: {"layer_types": config.layer_types},
            {"layer_types": None},
        ),
        FieldTransform(tuple(_SIZES), _read_sizes, _write_sizes, _SIZES),
        FieldTransform(tuple(_MOE), _read_moe, _write_moe, _MOE),
        FieldTransform(
            tuple(_WITHOUT),
            _read_unmodelled,
            lambda _: {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
            _WITHOUT,
        ),
    ),
    constants={
        **_gemma.CONSTANTS,
        "norm": "rms_wide",
        "qk_norm": "head",
        "value_norm": True,
        "layer_scale": True,
        "attention_multiplier": 1.0,
    },
    fixed={"hidden_activation": "gelu_pytorch_tanh", "attention_dropout": 0.0},
    passthrough={
        "use_bidirectional_attention": None,
        "use_double_wide_mlp": False,
        "vocab_size_per_layer_input": 262144,
    },
    optional=("moe", "full_attention"),
    key_mappings=(key_mapping(_layer),),
    ignore=ignore_tied_head,
)
