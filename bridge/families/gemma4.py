"""Gemma 4, the text model: full layers have wider heads, and may have experts.

Those of E2B and E4B have an input of each token for each layer, and their last layers
attend to keys and values of earlier ones. Of the models that also see and hear, the
text part is read.

Source: transformers `configuration_gemma4.py`, `modeling_gemma4.py`.
"""

from collections.abc import Mapping
from typing import Any

from bridge.families import _gemma
from bridge.families._blocks import (
    Rules,
    attention,
    mlp,
    norm,
    norms,
    of_full_layers,
    router,
)
from bridge.families._family import Family, Field, KeyMapping, Layers
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
    if kind.reuses:
        rules = _gemma.without_key_value(rules)
    if not kind.is_full or full is None:
        return rules
    if full.shared_key_value:
        rules = tuple(r for r in rules if ".v_proj." not in r.destinations[0])
    return of_full_layers(rules)


def _layer(config: DecoderConfig, kind: LayerKind) -> Rules:
    is_sparse, width = (
        kind.channels == "sparse",
        "reusing_mlp" if kind.reuses else "mlp",
    )
    dense = mlp(config, "mlp.", "mlp.shared_expert.", "shared_mlp")
    return (
        *_attention(config, kind),
        *(dense + _EXPERTS if is_sparse else mlp(config, width=width)),
        *norms({name: name for name in _gemma.NORMS}),
        *(_gemma.LAYER_INPUT if config.per_layer_input else ()),
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
    if not given:  # The full layers are like the others.
        return fields["head_dim"], None
    types = _read_types(fields)["layer_types"]
    full = [layer for layer, kind in enumerate(types) if kind == FULL]
    sizes = {tuple(sorted(each.items())) for each in given.values()}
    known = {"head_dim", "num_key_value_heads"}
    # Files pad the layers' numbers with zeros to one width: "05" beside "11".
    layers = sorted(int(layer) for layer in given if str(layer).isdecimal())
    named = len(layers) == len(given) and layers == full
    if not named or len(sizes) != 1 or set(dict(*sizes)) - known:
        raise ValueError(
            f"per_layer_config = {given!r}: the same head_dim and num_key_value_heads "
            f"for each of the full layers {', '.join(map(str, full))}"
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


_SMALL = {
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
}


def _read_small(fields: Mapping[str, Any]) -> dict[str, Any]:
    size, reusing = (
        fields[name] or 0
        for name in ("hidden_size_per_layer_input", "num_kv_shared_layers")
    )
    values: dict[str, Any] = {}
    if size:
        values["per_layer_input.size"] = size
        values["per_layer_input.vocab_size"] = fields["vocab_size_per_layer_input"]
    if reusing:
        width = fields["intermediate_size"] * (
            2 if fields["use_double_wide_mlp"] else 1
        )
        values["kv_sharing.num_layers"] = reusing
        values["kv_sharing.intermediate_size"] = width
    return values


def _write_small(config: DecoderConfig) -> dict[str, Any]:
    values = {**_SMALL, "hidden_size_per_layer_input": 0}
    if (inputs := config.per_layer_input) is not None:
        values["hidden_size_per_layer_input"] = inputs.size
        values["vocab_size_per_layer_input"] = inputs.vocab_size
    if (sharing := config.kv_sharing) is not None:
        times = sharing.intermediate_size / config.intermediate_size
        if times not in (1, 2):
            raise ValueError(
                f"kv_sharing.intermediate_size {sharing.intermediate_size}: once or "
                f"twice the {config.intermediate_size} of intermediate_size"
            )
        values["num_kv_shared_layers"] = sharing.num_layers
        values["use_double_wide_mlp"] = times == 2
    return values


def _read_direction(fields: Mapping[str, Any]) -> dict[str, Any]:
    if (given := fields["use_bidirectional_attention"]) not in (None, "vision"):
        raise ValueError(
            f"use_bidirectional_attention = {given!r}: only None is modelled, "
            "texts are causal"
        )
    return {}


FAMILY = Family(
    model_type="gemma4_text",
    architecture="Gemma4ForCausalLM",
    also_named=("gemma4_unified_text",),  # text part of Gemma 4 unified
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
        FieldTransform(tuple(_SMALL), _read_small, _write_small, _SMALL),
        FieldTransform(
            ("use_bidirectional_attention",),
            _read_direction,
            lambda _: {},
            {"use_bidirectional_attention": None},
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
    },
    optional=("moe", "full_attention", "per_layer_input", "kv_sharing"),
    key_mappings=(KeyMapping(_gemma.outer, Layers("model.layers.{layer}.", _layer)),),
    ignore=_gemma.ignore,
)
