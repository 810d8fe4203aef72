"""Rules of gated delta nets, and of attention whose heads are gated."""

from bridge.families._blocks import Rules, attention, linear
from bridge.models import DecoderConfig
from bridge.rules._rules import Rule

_AT, _TO = "linear_attn.", "delta_net."
_KEYS = "(key_heads key_dim)"
_VALUES = "(value_heads value_dim)"
_OF_KEY = "(key_heads values_of_key value_dim)"


def gated_attention(config: DecoderConfig) -> Rules:
    """Attention whose `q_proj` holds each head's query, then its gate."""
    kernel = "(heads head_dim) embed -> embed heads head_dim"
    bias = "(heads head_dim) -> heads head_dim"
    both = ("self_attn.q_proj", "self_attn.q_gate")
    rules = [rule for rule in attention(config) if "q_proj" not in rule.sources[0]]
    for name, leaf, layout in (("weight", "kernel", kernel), ("bias", "bias", bias)):
        if leaf == "kernel" or config.attention_bias:
            rules.append(
                Rule(
                    f"self_attn.q_proj.{name}",
                    tuple(f"{part}.{leaf}" for part in both),
                    (layout, layout),
                    repeat="heads",
                )
            )
    return tuple(rules)


def delta_net(config: DecoderConfig) -> Rules:
    """Delta net whose projections are two tensors, each key head's parts together."""
    del config
    keys = f"{_KEYS} embed -> embed key_heads key_dim"
    values = f"{_OF_KEY} embed -> embed (key_heads values_of_key) value_dim"
    scalars = "(key_heads values_of_key) embed -> embed (key_heads values_of_key)"
    return (
        Rule(
            f"{_AT}in_proj_qkvz.weight",
            tuple(f"{_TO}{name}_proj.kernel" for name in "qkvz"),
            (keys, keys, values, values),
            repeat="key_heads",
        ),
        Rule(
            f"{_AT}in_proj_ba.weight",
            tuple(f"{_TO}{name}_proj.kernel" for name in "ba"),
            (scalars, scalars),
            repeat="key_heads",
        ),
        *_RECURRENCE,
    )


def delta_net_apart(config: DecoderConfig) -> Rules:
    """Delta net whose projections are four tensors: q with k and v, z, b and a."""
    del config
    keys = f"{_KEYS} embed -> embed key_heads key_dim"
    values = f"{_VALUES} embed -> embed value_heads value_dim"
    scalars = "value_heads embed -> embed value_heads"
    return (
        Rule(
            f"{_AT}in_proj_qkv.weight",
            tuple(f"{_TO}{name}_proj.kernel" for name in "qkv"),
            (keys, keys, values),
        ),
        *linear(f"{_AT}in_proj_z", f"{_TO}z_proj", values),
        *linear(f"{_AT}in_proj_b", f"{_TO}b_proj", scalars),
        *linear(f"{_AT}in_proj_a", f"{_TO}a_proj", scalars),
        *_RECURRENCE,
    )


def delta_net_fused(config: DecoderConfig) -> Rules:
    """Delta net whose projections are one tensor: q, k, v, z, b and a."""
    del config
    keys = f"{_KEYS} embed -> embed key_heads key_dim"
    values = f"{_VALUES} embed -> embed value_heads value_dim"
    scalars = "value_heads embed -> embed value_heads"
    return (
        Rule(
            f"{_AT}in_proj.weight",
            tuple(f"{_TO}{name}_proj.kernel" for name in "qkvzba"),
            (keys, keys, values, values, scalars, scalars),
        ),
        *(rule for rule in _RECURRENCE if rule.destination != f"{_TO}norm.scale"),
        Rule(f"{_AT}out_norm.weight", f"{_TO}norm.scale", "value_dim -> value_dim"),
    )


_CONV_OF_KEYS = f"{_KEYS} one conv_kernel -> key_heads key_dim (one conv_kernel)"
_CONV_OF_VALUES = (
    f"{_VALUES} one conv_kernel -> value_heads value_dim (one conv_kernel)"
)
_RECURRENCE: Rules = (
    Rule(
        f"{_AT}conv1d.weight",
        tuple(f"{_TO}{name}_conv.kernel" for name in "qkv"),
        (_CONV_OF_KEYS, _CONV_OF_KEYS, _CONV_OF_VALUES),
    ),
    Rule(f"{_AT}A_log", f"{_TO}a_log", "value_heads -> value_heads"),
    Rule(f"{_AT}dt_bias", f"{_TO}dt_bias", "value_heads -> value_heads"),
    Rule(f"{_AT}norm.weight", f"{_TO}norm.scale", "value_dim -> value_dim"),
    Rule(
        f"{_AT}out_proj.weight",
        f"{_TO}o_proj.kernel",
        f"embed {_VALUES} -> value_heads value_dim embed",
    ),
)
