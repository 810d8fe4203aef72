"""Config of a Mamba 1 mixer."""

import dataclasses

from bridge.models._checks import raise_if, wrong_fields, wrong_sizes


@dataclasses.dataclass(frozen=True)
class Mamba1Config:
    """Sizes of a Mamba 1 mixer: a state space model with decays of its own a channel.

    Args:
      num_channels: Number of channels, each with a state.
      state_size: Width of the state of a channel.
      time_step_rank: Width of the vector that the time steps are projected from.
      kernel_size: Number of tokens that the convolution before it sees.
      conv_bias: Whether the convolution has a bias.
      proj_bias: Whether the projections into the mixer and back have biases.
      norm: Whether the vector of time steps and both projections of the state are
        normed.
      norm_scale: Whether these norms multiply by a scale.
      norm_eps: Epsilon of these norms; None for the decoder's.
      num_heads: Number of heads, each with projections of its own to time steps and
        of the state; None for one projection of all channels.
      fused_gate: Whether one projection holds the input and the gate of each channel,
        side by side.

    Raises:
      ValueError: If a field has an invalid value.

    Source: Mamba, https://arxiv.org/abs/2312.00752; with norms Jamba,
      https://arxiv.org/abs/2403.19887; with heads Zamba,
      https://arxiv.org/abs/2405.16712.
    """

    num_channels: int
    state_size: int
    time_step_rank: int
    kernel_size: int = 4
    conv_bias: bool = True
    proj_bias: bool = False
    norm: bool = False
    norm_scale: bool = True
    norm_eps: float | None = None
    num_heads: int | None = None
    fused_gate: bool = False

    def __post_init__(self):
        """Validates the sizes, and that norms are there that fields are of."""
        names = ("num_channels", "state_size", "time_step_rank", "kernel_size")
        wrong = wrong_fields(self) or wrong_sizes(self, (*names, "num_heads"))
        if not self.norm and (not self.norm_scale or self.norm_eps is not None):
            wrong = [*wrong, "norm_scale, norm_eps: norm=False has no norms"]
        if not wrong and self.num_heads is not None:
            if self.num_channels % self.num_heads:
                wrong.append(
                    f"num_heads {self.num_heads} does not divide num_channels "
                    f"{self.num_channels}"
                )
            if self.norm:
                wrong.append("num_heads: what heads project is not normed; norm=False")
        raise_if("Mamba1Config", wrong)
