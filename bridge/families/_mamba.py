"""Rules and sizes of Mamba 2 mixers."""

from collections.abc import Mapping
from typing import Any

from bridge.families._blocks import Rules
from bridge.families._field_transform import FieldTransform
from bridge.models import DecoderConfig
from bridge.rules._rules import Rule

_CHANNELS = "(mamba_heads mamba_dim)"
_STATE = "(mamba_groups mamba_state)"
_TAPS = "(one conv_kernel)"
_PARTS = (
    f"{_CHANNELS} {{0}} -> {{1}} mamba_heads mamba_dim {{2}}",
    f"{_STATE} {{0}} -> {{1}} mamba_groups mamba_state {{2}}",
)


def mamba(config: DecoderConfig, at: str = "mamba.") -> Rules:
    """A mixer whose projections are one tensor, and whose convolutions are one.

    Args:
      config: The model.
      at: Prefix of their names in the file.
    """
    sizes, to = config.mamba, "mamba."
    assert sizes is not None
    of_x, of_state = (p.format("embed", "embed", "") for p in _PARTS)
    of_heads = "mamba_heads embed -> embed mamba_heads"
    taps = [p.format("one conv_kernel", "", _TAPS) for p in _PARTS]
    own = [p.format("", "", "") for p in _PARTS]
    heads = "mamba_heads -> mamba_heads"
    parts = tuple(f"{to}{name}_proj" for name in ("z", "x", "b", "c", "dt"))
    convs = tuple(f"{to}{name}_conv" for name in "xbc")
    in_proj = (of_x, of_x, of_state, of_state, of_heads)
    rules = [
        split_rule(f"{at}in_proj.weight", parts, "kernel", in_proj),
        split_rule(f"{at}conv1d.weight", convs, "kernel", (taps[0], taps[1], taps[1])),
        Rule(f"{at}dt_bias", f"{to}dt_bias", heads),
        Rule(f"{at}A_log", f"{to}a_log", heads),
        Rule(f"{at}D", f"{to}skip", heads),
        Rule(
            f"{at}out_proj.weight",
            f"{to}o_proj.kernel",
            f"embed {_CHANNELS} -> mamba_heads mamba_dim embed",
        ),
    ]
    if sizes.norm is not None:
        layout = "(mamba_groups group_width) -> mamba_groups group_width"
        rules.append(Rule(f"{at}norm.weight", f"{to}norm.scale", layout))
    if sizes.conv_bias:
        biases = (own[0], own[1], own[1])
        rules.append(split_rule(f"{at}conv1d.bias", convs, "bias", biases))
    if sizes.proj_bias:
        biases = (own[0], own[0], own[1], own[1], heads)
        rules.append(split_rule(f"{at}in_proj.bias", parts, "bias", biases))
        rules.append(Rule(f"{at}out_proj.bias", f"{to}o_proj.bias", "embed -> embed"))
    return tuple(rules)


def split_rule(
    source: str, modules: tuple[str, ...], leaf: str, layouts: tuple[str, ...]
) -> Rule:
    """Returns the rule of one tensor that several modules share.

    Args:
      source: Name of the tensor.
      modules: The modules, in the order of its rows.
      leaf: Name of the parameter in each module.
      layouts: Layout of each part.
    """
    return Rule(source, tuple(f"{module}.{leaf}" for module in modules), layouts)


NAMES = {
    "mamba_n_heads": "num_heads",
    "mamba_d_head": "head_dim",
    "mamba_n_groups": "num_groups",
    "mamba_d_state": "state_size",
    "mamba_d_conv": "kernel_size",
    "mamba_conv_bias": "conv_bias",
    "mamba_proj_bias": "proj_bias",
    "mamba_chunk_size": "chunk_size",
}
"""Our sizes of a mixer by the fields of files whose names begin with `mamba_`."""


def mamba_sizes(**defaults: Any) -> FieldTransform:
    """Reads the sizes of a mixer whose fields begin with `mamba_`.

    Args:
      defaults: What transformers takes for fields that a file does not say.
    """
    known = {**defaults, "time_step_limit": (0.0, float("inf"))}

    def read(fields: Mapping[str, Any]) -> dict[str, Any]:
        width = fields["mamba_expand"] * fields["hidden_size"]
        heads, head_dim = fields["mamba_n_heads"], fields["mamba_d_head"]
        head_dim = width // heads if head_dim == "auto" else head_dim
        if heads * head_dim != width:
            raise ValueError(
                f"mamba_n_heads {heads} of mamba_d_head {head_dim} are not mamba_expand"
                f" {fields['mamba_expand']} times hidden_size {fields['hidden_size']}"
            )
        values = {ours: fields[name] for name, ours in NAMES.items()}
        values |= {"head_dim": head_dim, **read_limit(fields["time_step_limit"])}
        return {f"mamba.{name}": value for name, value in values.items()}

    def write(config: DecoderConfig) -> dict[str, Any]:
        sizes = config.mamba
        assert sizes is not None
        return {
            **{name: getattr(sizes, ours) for name, ours in NAMES.items()},
            "mamba_expand": sizes.num_heads * sizes.head_dim // config.hidden_size,
            "time_step_limit": write_limit(config),
        }

    return FieldTransform(tuple(known), read, write, known)


def read_limit(limit: Any) -> dict[str, float | None]:
    """Reads the bounds of a time step, of which the upper may be infinite."""
    low, high = (_number(bound) for bound in limit)
    return {"min_time_step": low, "max_time_step": None if high == _INFINITY else high}


def write_limit(config: DecoderConfig) -> tuple[float, float]:
    """Writes the bounds of a time step."""
    assert config.mamba is not None
    high = config.mamba.max_time_step
    return config.mamba.min_time_step, _INFINITY if high is None else high


_INFINITY = float("inf")


def _number(bound: Any) -> Any:
    """Returns a bound; transformers 5 writes `{"__float__": "Infinity"}`."""
    if isinstance(bound, Mapping) and set(bound) == {"__float__"}:
        return float(bound["__float__"])
    return bound
