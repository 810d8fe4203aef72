"""Laguna: query heads by type of layer, gated by a softplus, and experts.

Source: transformers `configuration_laguna.py`, `modeling_laguna.py`,
  `conversion_mapping.py`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from bridge.families._blocks import (
    FUSED_EXPERTS,
    PRE_NORMS,
    Rules,
    attention,
    experts,
    ignore_tied_head,
    key_mapping,
    linear,
    mlp,
    norms,
    of_full_layers,
    router,
)
from bridge.families._family import Family, Field
from bridge.families._field_transform import FieldTransform
from bridge.families._fields import (
    EXPERT_TRAINING,
    SIZES,
    attention_bias,
    moe,
    tokens,
)
from bridge.families._hf_rope import TYPES, read_rope, write_rope
from bridge.families._layer_types import DENSE_BY_TYPE, FULL, SLIDING, sliding_or_full
from bridge.models import DecoderConfig, LayerKind, RopeConfig
from bridge.rules._rules import Rule

Fields = Mapping[str, Any]
_TYPES = sliding_or_full(lambda fields: [FULL] * fields["num_hidden_layers"])


def _attention(config: DecoderConfig, kind: LayerKind) -> Rules:
    width = "one" if config.attention_gate_per_head else "head_dim"
    gate = f"(heads {width}) embed -> embed heads {width}"
    rules = (*attention(config), *linear("self_attn.g_proj", "self_attn.q_gate", gate))
    return of_full_layers(rules) if kind.is_full else rules


def _layer(
    shared: str, bias: str, run: Rules
) -> Callable[[DecoderConfig, LayerKind], Rules]:
    correction = Rule(
        f"mlp.{bias}.e_score_correction_bias",
        "mlp.router.correction_bias",
        "experts -> experts",
    )

    def rules(config: DecoderConfig, kind: LayerKind) -> Rules:
        inner = mlp(config)
        if kind.channels == "sparse":
            beside = mlp(config, f"mlp.{shared}.", "mlp.shared_expert.", "shared_mlp")
            inner = (*router(), correction, *run, *beside)
        return _attention(config, kind) + inner + norms(PRE_NORMS)

    return rules


_HEADS, _OF_LAYERS = "num_attention_heads", "num_attention_heads_per_layer"


def _read_heads(fields: Fields) -> dict[str, Any]:
    types = _TYPES.read(fields)["layer_types"]
    counts = fields[_OF_LAYERS] or [fields[_HEADS]] * len(types)
    by_type = {
        kind: {
            count for each, count in zip(types, counts, strict=False) if each == kind
        }
        for kind in (FULL, SLIDING)
    }
    if len(counts) != len(types) or any(len(each) > 1 for each in by_type.values()):
        raise ValueError(
            f"{_OF_LAYERS} = {list(counts)!r}: a number for each of the {len(types)} "
            "layers, the same in all of one type"
        )
    full, sliding = (next(iter(by_type[kind]), fields[_HEADS]) for kind in by_type)
    return {
        _HEADS: sliding,
        "full_attention.num_attention_heads": full,
        "full_attention.num_key_value_heads": fields["num_key_value_heads"],
        "full_attention.head_dim": fields["head_dim"],
    }


def _write_heads(config: DecoderConfig) -> dict[str, Any]:
    assert config.full_attention is not None
    full = config.full_attention.num_attention_heads
    types = config.layer_types or (FULL,) * config.num_hidden_layers
    counts = [full if kind == FULL else config.num_attention_heads for kind in types]
    return {_HEADS: config.num_attention_heads, _OF_LAYERS: counts}


_ROPES = "rope_parameters"
_ABSENT = {
    FULL: {
        "rope_type": "default",
        "rope_theta": 500000.0,
        "partial_rotary_factor": 0.5,
    },
    SLIDING: {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 1.0,
    },
}


def _read_ropes(fields: Fields) -> dict[str, Any]:
    nested = fields[_ROPES] or _ABSENT
    types = set(_TYPES.read(fields)["layer_types"])
    if not isinstance(nested, Mapping) or types - nested.keys():
        raise ValueError(f"{_ROPES} = {nested!r}: a rope for each of {sorted(types)}")
    if unknown := sorted(nested.keys() - _ABSENT.keys()):
        raise ValueError(f"{_ROPES} has {unknown}, which are no types of layers")
    beside = ("rope_theta", "rope_scaling", "partial_rotary_factor")
    if given := [name for name in beside if fields[name] is not None]:
        raise ValueError(f"{given}: transformers reads {_ROPES} alone of this family")
    ropes = {kind: _rope(nested.get(kind, _ABSENT[kind]), fields) for kind in _ABSENT}
    return {"rope": ropes[FULL], "sliding_rope": ropes[SLIDING]}


def _rope(given: Any, fields: Fields) -> RopeConfig:
    if not isinstance(given, Mapping) or given.get("rope_theta") is None:
        raise ValueError(f"{_ROPES} has {given!r}: each rope says its rope_theta")
    longest = "max_position_embeddings"
    rope = read_rope({_ROPES: given, longest: fields[longest]})
    if rope.rope_type not in TYPES:
        raise ValueError(f"rope_type {rope.rope_type!r}: this family has {TYPES}")
    return rope


def _write_ropes(config: DecoderConfig) -> dict[str, Any]:
    assert config.rope is not None
    sliding = config.sliding_rope or config.rope
    ropes = {FULL: config.rope, SLIDING: sliding}
    return {
        _ROPES: {kind: write_rope(r)["rope_parameters"] for kind, r in ropes.items()}
    }


_GATES = {True: True, "per-head": True, "per-element": False}


def _read_gate(fields: Fields) -> dict[str, Any]:
    given = fields["gating"]
    if given not in _GATES:
        raise ValueError(f"gating = {given!r}: known are {list(_GATES)}")
    if fields["attention_bias"] and not _GATES[given]:
        raise ValueError(
            f"gating = {given!r} beside attention_bias: gates of each dim have no bias "
            "of their own, which is not modelled"
        )
    return {"attention_gate_per_head": _GATES[given]}


def _write_gate(config: DecoderConfig) -> dict[str, Any]:
    return {"gating": "per-head" if config.attention_gate_per_head else "per-element"}


FAMILY = Family(
    model_type="laguna",
    architecture="LagunaForCausalLM",
    fields={
        **{name: field for name, field in SIZES.items() if name != _HEADS},
        **tokens(None, None),
        **attention_bias(),
        **moe(
            num_experts=("num_experts", 256),
            num_experts_per_tok=("num_experts_per_tok", 8),
            intermediate_size=("moe_intermediate_size", 512),
            shared_intermediate_size=("shared_expert_intermediate_size", 512),
            routed_scaling_factor=("moe_routed_scaling_factor", 1.0),
        ),
        "num_key_value_heads": Field(8),
        "head_dim": Field(128),
        "max_position_embeddings": Field(131072),
        "rms_norm_eps": Field(1e-6, "norm_eps"),
        "sliding_window": Field(512),
    },
    transforms=(
        FieldTransform(
            (_ROPES, "rope_theta", "rope_scaling", "partial_rotary_factor"),
            _read_ropes,
            _write_ropes,
            dict.fromkeys(
                (_ROPES, "rope_theta", "rope_scaling", "partial_rotary_factor")
            ),
        ),
        _TYPES,
        DENSE_BY_TYPE,
        FieldTransform(
            (_HEADS, _OF_LAYERS),
            _read_heads,
            _write_heads,
            {_HEADS: 48, _OF_LAYERS: None},
        ),
        FieldTransform(("gating",), _read_gate, _write_gate, {"gating": True}),
    ),
    constants={
        "qk_norm": "head",
        "attention_gate": True,
        "attention_gate_activation": "softplus",
        "moe.scoring": "sigmoid",
        "moe.norm_topk_prob": True,
        "moe.norm_topk_eps": 0.0,
        "moe.correction_bias": True,
    },
    optional=("full_attention",),
    fixed={
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "moe_apply_router_weight_on_input": False,
        "moe_router_logit_softcapping": 0.0,
    },
    passthrough=EXPERT_TRAINING,
    key_mappings=(
        key_mapping(_layer("shared_expert", "experts", experts())),
        key_mapping(_layer("shared_experts", "gate", FUSED_EXPERTS)),
    ),
    ignore=ignore_tied_head,
)
