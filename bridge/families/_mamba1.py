"""Rules of Mamba 1 mixers."""

from bridge.families._blocks import Rules, linear
from bridge.families._mamba import split_rule
from bridge.models import DecoderConfig
from bridge.rules._rules import Rule

_INTO = "channels embed -> embed channels"
_DECAYS = "channels channel_state"


def mamba1(config: DecoderConfig, at: str = "mamba.") -> Rules:
    """A mixer whose projections are one tensor, as are time steps and the state's.

    Args:
      config: The model.
      at: Prefix of their names in the file.
    """
    sizes, to, own = config.mamba1, "mamba1.", "channels -> channels"
    assert sizes is not None
    into = (f"{to}x_proj", f"{to}z_proj")
    reads = tuple(f"{to}{name}_proj" for name in ("step", "b", "c"))
    of_state = "channel_state channels -> channels channel_state"
    of_step = "step_rank channels -> channels step_rank"
    rules = [
        split_rule(f"{at}in_proj.weight", into, "kernel", (_INTO, _INTO)),
        split_rule(
            f"{at}x_proj.weight", reads, "kernel", (of_step, of_state, of_state)
        ),
        *linear(
            f"{at}conv1d",
            f"{to}x_conv",
            "channels one conv_kernel -> channels (one conv_kernel)",
            own if sizes.conv_bias else None,
        ),
        *linear(
            f"{at}dt_proj",
            f"{to}dt_proj",
            "channels step_rank -> step_rank channels",
            own,
        ),
        Rule(f"{at}A_log", f"{to}a_log", f"{_DECAYS} -> {_DECAYS}"),
        Rule(f"{at}D", f"{to}skip", own),
        *linear(
            f"{at}out_proj",
            f"{to}o_proj",
            "embed channels -> channels embed",
            "embed -> embed" if sizes.proj_bias else None,
        ),
    ]
    if sizes.proj_bias:
        rules.append(split_rule(f"{at}in_proj.bias", into, "bias", (own, own)))
    if sizes.norm and sizes.norm_scale:
        rules += [
            Rule(f"{at}{name}_layernorm.weight", f"{to}{ours}_norm.scale", layout)
            for name, ours, layout in (
                ("dt", "step", "step_rank -> step_rank"),
                ("b", "b", "channel_state -> channel_state"),
                ("c", "c", "channel_state -> channel_state"),
            )
        ]
    return tuple(rules)
