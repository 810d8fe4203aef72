"""Ling 3.0: delta nets with bounded decays, and gated latent attention.

The layers that predict further tokens are left out, as transformers leaves them out.

Source: transformers `configuration_bailing_hybrid.py`, `modeling_bailing_hybrid.py`,
  `conversion_mapping.py`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from bridge.families import _deepseek
from bridge.families._blocks import (
    FUSED_EXPERTS,
    PRE_NORMS,
    Rules,
    experts,
    latent_attention,
    linear,
    mlp,
    norms,
    outside,
    router,
)
from bridge.families._family import Family, Field, KeyMapping, Layers
from bridge.families._field_transform import FieldTransform
from bridge.families._fields import moe
from bridge.families._hf_rope import rope
from bridge.families._layer_types import (
    FULL,
    first_dense_or_by_type,
    interval,
    mixer_types,
)
from bridge.models import DecoderConfig, LayerKind
from bridge.rules._rules import Rule

Fields = Mapping[str, Any]
_LINEAR = "linear_attention"
_TO = "delta_net."
_KEYS = "(key_heads key_dim)"
_VALUES = "(value_heads value_dim)"
_OF_KEYS = f"{_KEYS} embed -> embed key_heads key_dim"
_OF_VALUES = f"{_VALUES} embed -> embed value_heads value_dim"
_OF_HEADS = "value_heads embed -> embed value_heads"
_CONV_OF_KEYS = f"{_KEYS} one conv_kernel -> key_heads key_dim (one conv_kernel)"
_CONVS = {
    "q": _CONV_OF_KEYS,
    "k": _CONV_OF_KEYS,
    "v": f"{_VALUES} one conv_kernel -> value_heads value_dim (one conv_kernel)",
}


def _convs_apart(at: str) -> Rules:
    return tuple(
        Rule(f"{at}{name}_conv1d.weight", f"{_TO}{name}_conv.kernel", layout)
        for name, layout in _CONVS.items()
    )


def _convs_joined(at: str) -> Rules:
    kernels = tuple(f"{_TO}{name}_conv.kernel" for name in _CONVS)
    return (Rule(f"{at}conv1d.weight", kernels, tuple(_CONVS.values())),)


def _delta_net(at: str, gate: str, out: str) -> Rules:
    """Rules of a delta net without its convolutions.

    Args:
      at: Prefix of its names in the file.
      gate: Prefix of those of its decays.
      out: Name of the projection back.
    """
    return (
        *linear(at + "q_proj", _TO + "q_proj", _OF_KEYS),
        *linear(at + "k_proj", _TO + "k_proj", _OF_KEYS),
        *linear(at + "v_proj", _TO + "v_proj", _OF_VALUES),
        *linear(gate + "f_proj", _TO + "a_proj", _OF_KEYS),
        Rule(gate + "A_log", _TO + "a_log", "value_heads -> value_heads"),
        Rule(gate + "dt_bias", _TO + "dt_bias", f"{_KEYS} -> key_heads key_dim"),
        *linear(at + "b_proj", _TO + "b_proj", _OF_HEADS),
        *linear(at + "g_proj", _TO + "z_proj", _OF_VALUES),
        Rule(at + "o_norm.weight", _TO + "norm.scale", "value_dim -> value_dim"),
        *linear(
            at + out, _TO + "o_proj", f"embed {_VALUES} -> value_heads value_dim embed"
        ),
    )


def _attention(config: DecoderConfig, at: str, out: str) -> Rules:
    """Rules of latent attention with a gate of each head."""
    own = (
        rule
        for rule in latent_attention(config, at)
        if not rule.destinations[0].startswith("self_attn.o_proj")
    )
    back = "embed (heads v_head_dim) -> heads v_head_dim embed"
    bias = "embed -> embed" if config.attention_out_bias else None
    gate = "(heads one) embed -> embed heads one"
    return (
        *own,
        *linear(at + out, "self_attn.o_proj", back, bias),
        *linear(at + "g_proj", "self_attn.q_gate", gate),
    )


def _layer(
    mix: Callable[[DecoderConfig, LayerKind], Rules], bias: str, run: Rules
) -> Callable[[DecoderConfig, LayerKind], Rules]:
    correction = Rule(
        f"mlp.gate.{bias}", "mlp.router.correction_bias", "experts -> experts"
    )

    def rules(config: DecoderConfig, kind: LayerKind) -> Rules:
        inner = mlp(config)
        if kind.channels == "sparse":
            inner = (*router(), correction, *run, *_deepseek.shared(config))
        return mix(config, kind) + inner + norms(PRE_NORMS)

    return rules


def _mix_as_written(out: str) -> Callable[[DecoderConfig, LayerKind], Rules]:
    """Returns the rules of mixers, `out` the name of a delta net's projection back."""
    at = "attention."

    def rules(config: DecoderConfig, kind: LayerKind) -> Rules:
        if kind.mixer == "attention":
            return _attention(config, at, "dense")
        return _delta_net(at, at, out) + _convs_apart(at)

    return rules


def _mix_in_memory(config: DecoderConfig, kind: LayerKind) -> Rules:
    at, out = "self_attn.", "o_proj"
    if kind.mixer == "attention":
        return _attention(config, at, out)
    return _delta_net(at, at + "forget_gate.", out) + _convs_joined(at)


_AT = "model.layers.{layer}."
# transformers writes the first name of the projection back, and reads both.
_WRITTEN = tuple(
    KeyMapping(
        outside("model.word_embeddings"),
        Layers(_AT, _layer(_mix_as_written(out), "expert_bias", experts())),
    )
    for out in ("dense", "o_proj")
)
_IN_MEMORY = KeyMapping(
    outside(),
    Layers(_AT, _layer(_mix_in_memory, "e_score_correction_bias", FUSED_EXPERTS)),
)

# transformers makes other types of as many dims as `head_dim` says.
_ROPE = rope(6000000.0, interleaved=True, types=("default",))
# transformers derives the first ones of the second, and writes all.
_SIZES = {
    "linear_head_dim": "head_dim",
    "linear_num_heads": "num_attention_heads",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}


def _read_sizes(fields: Fields) -> dict[str, Any]:
    width, heads, kernel = (
        fields[other] if fields[name] is None else fields[name]
        for name, other in _SIZES.items()
    )
    counts = ("delta_net.num_key_heads", "delta_net.num_value_heads")
    widths = ("delta_net.key_head_dim", "delta_net.value_head_dim")
    return {
        **dict.fromkeys(counts, heads),
        **dict.fromkeys(widths, width),
        "delta_net.kernel_size": kernel,
    }


def _write_sizes(config: DecoderConfig) -> dict[str, Any]:
    delta = config.delta_net
    assert delta is not None
    return {
        "head_dim": delta.key_head_dim,
        "linear_head_dim": delta.key_head_dim,
        "linear_num_heads": delta.num_key_heads,
        "short_conv_kernel_size": delta.kernel_size,
    }


_SAFE, _BOUND = "kda_safe_gate", "kda_lower_bound"


def _read_bound(fields: Fields) -> dict[str, Any]:
    return {"delta_net.decay_bound": fields[_BOUND] if fields[_SAFE] else None}


def _write_bound(config: DecoderConfig) -> dict[str, Any]:
    assert config.delta_net is not None
    bound = config.delta_net.decay_bound
    return {_SAFE: False} if bound is None else {_SAFE: True, _BOUND: bound}


_EVERY, _DIM = "layer_group_size", "qk_head_dim"


def _absent(fields: Fields) -> list[str]:
    every = interval(fields, _EVERY)
    layers = range(fields["num_hidden_layers"])
    return [_LINEAR if (layer + 1) % every else FULL for layer in layers]


def _check_key_dim(fields: Fields) -> dict[str, Any]:
    given, want = fields[_DIM], fields["qk_nope_head_dim"] + fields["qk_rope_head_dim"]
    if given not in (None, want):
        raise ValueError(f"{_DIM} = {given!r}: the other sizes say {want}")
    return {}


def _ignore(config: DecoderConfig) -> tuple[str, ...]:
    further = dict(config.passthrough)[_deepseek.FURTHER] or 0
    last = config.num_hidden_layers
    head = ("lm_head.weight",) if config.tie_word_embeddings else ()
    return tuple(f"model.layers.{last + i}.**" for i in range(further)) + head


FAMILY = Family(
    model_type="bailing_hybrid",
    architecture="BailingHybridForCausalLM",
    fields={
        **{
            name: field
            for name, field in _deepseek.FIELDS.items()
            if name != "max_position_embeddings"
        },
        **moe(
            num_experts=("num_experts", 512),
            intermediate_size=("moe_intermediate_size", 768),
            routed_scaling_factor=("routed_scaling_factor", 2.5),
            topk_group=("topk_group", 4),
        ),
        "num_experts_per_token": Field(
            8, "moe.num_experts_per_tok", ("num_experts_per_tok",)
        ),
        "moe_renormalize": Field(True, "moe.norm_topk_prob", ("norm_topk_prob",)),
        "num_expert_group": Field(8, "moe.n_group", ("n_group",)),
        "model_max_length": Field(
            262144, "max_position_embeddings", ("max_position_embeddings",)
        ),
        "num_key_value_heads": Field(32),
        "q_lora_rank": Field(None, "mla.q_lora_rank"),
        "bos_token_id": Field(None),
        "eos_token_id": Field(156895),
        "pad_token_id": Field(156892),
    },
    transforms=(
        dataclasses.replace(
            _ROPE, defaults={**_ROPE.defaults, "rope_theta": 6000000.0}
        ),
        mixer_types({_LINEAR: "delta_net"}, _absent, {_EVERY: 6}),
        first_dense_or_by_type(2),
        FieldTransform(
            (*_SIZES, "head_dim", "short_conv_kernel_size"),
            _read_sizes,
            _write_sizes,
            {
                **dict.fromkeys(_SIZES),
                "head_dim": 128,
                "short_conv_kernel_size": 4,
            },
        ),
        FieldTransform(
            (_SAFE, _BOUND), _read_bound, _write_bound, {_SAFE: True, _BOUND: -5.0}
        ),
        FieldTransform((_DIM,), _check_key_dim, lambda config: {}, {_DIM: None}),
        _deepseek.shared_experts(1, "num_shared_experts"),
    ),
    constants={
        **_deepseek.SIGMOID_ROUTER,
        "attention_gate": True,
        "attention_gate_per_head": True,
        "delta_net.gate_activation": "sigmoid",
        "delta_net.decay_by_dim": True,
    },
    optional=("delta_net",),
    fixed={"hidden_act": "silu", "attention_dropout": 0.0},
    passthrough={
        "output_router_logits": False,
        "pretraining_tp": 1,
        "mtp_loss_scaling_factor": 0.0,
        _deepseek.FURTHER: 1,
    },
    aliases={
        "n_shared_experts": "num_shared_experts",
        "num_mtp_layers": _deepseek.FURTHER,
    },
    left_out={_deepseek.FURTHER: 0},
    key_mappings=(*_WRITTEN, _IN_MEMORY),
    ignore=_ignore,
)
