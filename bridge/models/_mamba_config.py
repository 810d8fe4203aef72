"""Config of a Mamba 2 mixer."""

import dataclasses
from typing import Literal

from bridge.models._checks import raise_if, wrong_fields, wrong_sizes


@dataclasses.dataclass(frozen=True)
class MambaConfig:
    """Sizes of a Mamba 2 mixer: a state space model with one decay a head.

    Args:
      num_heads: Number of heads.
      head_dim: Width of a head.
      num_groups: Number of groups of heads that share input and output projections
        of the state, and the mean square of the norm.
      state_size: Width of the state of a channel.
      kernel_size: Number of tokens that the convolution before it sees.
      conv_bias: Whether the convolution has a bias.
      proj_bias: Whether the projections into the mixer and back have biases.
      norm: Norm of the outputs of the heads: `after_gate` or `before_gate`; None for
        none.
      chunk_size: Number of tokens that are computed at once; no result depends on it
        but for rounding.
      min_time_step: Lower bound on the time step.
      max_time_step: Upper bound on the time step; None for no bound.
      norm_eps: Epsilon of the norm; None for that of the decoder.

    Raises:
      ValueError: If a field has an invalid value, or the groups do not divide the
        heads.

    Source: Mamba 2, https://arxiv.org/abs/2405.21060.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    kernel_size: int = 4
    conv_bias: bool = True
    proj_bias: bool = False
    norm: Literal["after_gate", "before_gate"] | None = "after_gate"
    chunk_size: int = 256
    min_time_step: float = 0.0
    max_time_step: float | None = None
    norm_eps: float | None = None

    def __post_init__(self):
        """Validates the sizes."""
        wrong = wrong_fields(self) or wrong_sizes(self, _SIZES)
        if not wrong and self.num_heads % self.num_groups:
            wrong = [
                f"num_heads {self.num_heads} is not a multiple of num_groups "
                f"{self.num_groups}"
            ]
        raise_if("MambaConfig", wrong)


_SIZES = (
    *("num_heads", "head_dim", "num_groups", "state_size"),
    *("kernel_size", "chunk_size"),
)
