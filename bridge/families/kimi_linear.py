"""Kimi Linear: delta nets with a decay of each dim, latent attention without a rope.

transformers writes a dense MLP under the name of the sparse ones; an export has the
names of the published files, which transformers reads as well.

Source: transformers `configuration_kimi_linear.py`, `modeling_kimi_linear.py`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from bridge.families import _deepseek
from bridge.families._blocks import (
    FUSED_EXPERTS,
    PRE_NORMS,
    Rules,
    experts,
    ignore_tied_head,
    key_mapping,
    latent_attention,
    linear,
    mlp,
    norms,
    router,
)
from bridge.families._family import Family, Field
from bridge.families._field_transform import FieldTransform
from bridge.families._fields import moe
from bridge.families._layer_types import FULL, first_dense_or_by_type, mixer_types
from bridge.models import DecoderConfig, LayerKind
from bridge.rules._rules import Rule

Fields = Mapping[str, Any]
_LINEAR = "linear_attention"
_AT, _TO = "self_attn.", "delta_net."
_KEYS = "(key_heads key_dim)"
_VALUES = "(value_heads value_dim)"
_CONVS = {
    "q": f"{_KEYS} one conv_kernel -> key_heads key_dim (one conv_kernel)",
    "k": f"{_KEYS} one conv_kernel -> key_heads key_dim (one conv_kernel)",
    "v": f"{_VALUES} one conv_kernel -> value_heads value_dim (one conv_kernel)",
}
_CONVS_APART: Rules = tuple(
    Rule(f"{_AT}{name}_conv1d.weight", f"{_TO}{name}_conv.kernel", layout)
    for name, layout in _CONVS.items()
)
_CONVS_JOINED: Rules = (
    Rule(
        f"{_AT}conv1d.weight",
        tuple(f"{_TO}{name}_conv.kernel" for name in _CONVS),
        tuple(_CONVS.values()),
    ),
)


def _delta_net(gate: str, convs: Rules) -> Rules:
    """Rules of a delta net.

    Args:
      gate: Name of the module of its decays, with a dot, or empty.
      convs: Rules of its convolutions.
    """
    keys = f"{_KEYS} embed -> embed key_heads key_dim"
    values = f"{_VALUES} embed -> embed value_heads value_dim"
    decays, gates = (f"{kind}_rank embed -> embed {kind}_rank" for kind in _RANKS)
    steps = f"{_KEYS} decay_rank -> decay_rank key_heads key_dim"
    scales = f"{_VALUES} gate_rank -> gate_rank value_heads value_dim"
    heads = "one_a one_b value_heads one_c"
    return (
        *linear(_AT + "q_proj", _TO + "q_proj", keys),
        *linear(_AT + "k_proj", _TO + "k_proj", keys),
        *linear(_AT + "v_proj", _TO + "v_proj", values),
        *convs,
        *linear(f"{_AT}{gate}f_a_proj", _TO + "a_down", decays),
        *linear(f"{_AT}{gate}f_b_proj", _TO + "a_proj", steps),
        Rule(f"{_AT}{gate}A_log", _TO + "a_log", f"{heads} -> ({heads})"),
        Rule(f"{_AT}{gate}dt_bias", _TO + "dt_bias", f"{_KEYS} -> key_heads key_dim"),
        *linear(
            _AT + "b_proj", _TO + "b_proj", "value_heads embed -> embed value_heads"
        ),
        *linear(_AT + "g_a_proj", _TO + "z_down", gates),
        *linear(_AT + "g_b_proj", _TO + "z_proj", scales),
        Rule(f"{_AT}o_norm.weight", _TO + "norm.scale", "value_dim -> value_dim"),
        *linear(
            _AT + "o_proj",
            _TO + "o_proj",
            f"embed {_VALUES} -> value_heads value_dim embed",
        ),
    )


_RANKS = ("decay", "gate")


def _layer(
    mixer: Rules, run: Rules, sparse: str, dense: str
) -> Callable[[DecoderConfig, LayerKind], Rules]:
    bias = Rule(
        sparse + "gate.e_score_correction_bias",
        "mlp.router.correction_bias",
        "experts -> experts",
    )

    def rules(config: DecoderConfig, kind: LayerKind) -> Rules:
        attends = kind.mixer == "attention"
        mixed = latent_attention(config) if attends else mixer
        inner = mlp(config, dense)
        if kind.channels == "sparse":
            at = sparse + "shared_experts."
            shared = mlp(config, at, "mlp.shared_expert.", "shared_mlp")
            inner = (*router(sparse + "gate"), bias, *run, *shared)
        return mixed + inner + norms(PRE_NORMS)

    return rules


_SPARSE = "block_sparse_moe."
_PUBLISHED = _delta_net("", _CONVS_APART)
_APART = experts(_SPARSE + "experts.{expert}.", gate="w1", up="w3", down="w2")

_CONFIG = "linear_attn_config"
_SIZES = {
    "linear_head_dim": ("head_dim", 128),
    "linear_num_heads": ("num_heads", 32),
    "linear_conv_kernel_dim": ("short_conv_kernel_size", 4),
}
_LISTS = ("full_attn_layers", "kda_layers")


def _nested(fields: Fields) -> Fields:
    """Returns what published files say of delta nets in a field of their own."""
    nested = fields[_CONFIG] or {}
    known = {*_LISTS, *(name for name, _ in _SIZES.values())}
    if not isinstance(nested, Mapping) or set(nested) - known:
        raise ValueError(f"{_CONFIG} = {nested!r}: known are {sorted(known)}")
    return nested


def _read_sizes(fields: Fields) -> dict[str, Any]:
    nested = _nested(fields)
    width, heads, kernel = (
        nested.get(inner, fields[name]) for name, (inner, _) in _SIZES.items()
    )
    return {
        **dict.fromkeys(
            ("delta_net.num_key_heads", "delta_net.num_value_heads"), heads
        ),
        **dict.fromkeys(("delta_net.key_head_dim", "delta_net.value_head_dim"), width),
        **dict.fromkeys(("delta_net.decay_rank", "delta_net.gate_rank"), width),
        "delta_net.kernel_size": kernel,
    }


def _write_sizes(config: DecoderConfig) -> dict[str, Any]:
    delta = config.delta_net
    assert delta is not None
    return {
        "linear_head_dim": delta.key_head_dim,
        "linear_num_heads": delta.num_key_heads,
        "linear_conv_kernel_dim": delta.kernel_size,
    }


_DELTA_NET = FieldTransform(
    (*_SIZES, _CONFIG),
    _read_sizes,
    _write_sizes,
    {**{name: default for name, (_, default) in _SIZES.items()}, _CONFIG: None},
)


def _absent(fields: Fields) -> list[str]:
    """Returns the types that a published file lists, counted from 1."""
    nested, count = _nested(fields), fields["num_hidden_layers"]
    if not all(name in nested for name in _LISTS):
        return [FULL if i and i % 4 == 0 else _LINEAR for i in range(count)]
    full, delta = (list(nested[name]) for name in _LISTS)
    if sorted(full + delta) != list(range(1, count + 1)):
        raise ValueError(
            f"{_CONFIG}: full_attn_layers {full} and kda_layers {delta} are not layers "
            f"1 to {count}"
        )
    return [FULL if i + 1 in full else _LINEAR for i in range(count)]


def _check_key_dim(fields: Fields) -> dict[str, Any]:
    given, want = fields[_DIM], fields["qk_nope_head_dim"] + fields["qk_rope_head_dim"]
    if given not in (None, want):
        raise ValueError(f"{_DIM} = {given!r}: the other sizes say {want}")
    return {}


_DIM = "qk_head_dim"
_WIDTHS = (_DIM, "head_dim")
_HEAD_DIMS = FieldTransform(
    _WIDTHS, _check_key_dim, lambda config: {}, dict.fromkeys(_WIDTHS)
)
"""`head_dim` is 72 in published files, another in transformers', and of no head."""

FAMILY = Family(
    model_type="kimi_linear",
    architecture="KimiLinearForCausalLM",
    fields={
        **{
            name: field
            for name, field in _deepseek.FIELDS.items()
            if name != "max_position_embeddings"
        },
        **moe(
            num_experts=("num_experts", 256),
            intermediate_size=("moe_intermediate_size", 1024),
            routed_scaling_factor=("routed_scaling_factor", 2.446),
            topk_group=("topk_group", 1),
        ),
        "num_experts_per_token": Field(
            8, "moe.num_experts_per_tok", ("num_experts_per_tok",)
        ),
        "moe_renormalize": Field(True, "moe.norm_topk_prob", ("norm_topk_prob",)),
        "num_expert_group": Field(1, "moe.n_group", ("n_group",)),
        "model_max_length": Field(
            1048576, "max_position_embeddings", ("max_position_embeddings",)
        ),
        "num_key_value_heads": Field(32),
        "q_lora_rank": Field(None, "mla.q_lora_rank"),
        "bos_token_id": Field(163584),
        "eos_token_id": Field(163586),
        "pad_token_id": Field(163839),
        "rms_norm_eps": Field(1e-5, "norm_eps"),
    },
    transforms=(
        mixer_types({_LINEAR: "delta_net"}, _absent),
        first_dense_or_by_type(1),
        _DELTA_NET,
        _deepseek.shared_experts(1, "num_shared_experts"),
        _HEAD_DIMS,
    ),
    constants={
        **_deepseek.SIGMOID_ROUTER,
        "rope": None,
        "learned_positions": False,
        "delta_net.gate_activation": "sigmoid",
        "delta_net.decay_by_dim": True,
    },
    optional=("delta_net",),
    fixed={"hidden_act": "silu", "attention_dropout": 0.0},
    passthrough={"output_router_logits": False},
    aliases={"n_shared_experts": "num_shared_experts"},
    # Of published files: what the model has always.
    inert={
        "mla_use_nope": True,
        "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid",
        "use_grouped_topk": True,
    },
    key_mappings=(
        key_mapping(_layer(_PUBLISHED, _APART, _SPARSE, "mlp.")),
        key_mapping(_layer(_PUBLISHED, _APART, _SPARSE, _SPARSE)),
        key_mapping(
            _layer(
                _delta_net("forget_gate.", _CONVS_JOINED), FUSED_EXPERTS, "mlp.", "mlp."
            )
        ),
    ),
    ignore=ignore_tied_head,
)
