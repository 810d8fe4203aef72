"""Config of a gated delta net."""

import dataclasses
from typing import Literal

from bridge.models._checks import raise_if, wrong_fields, wrong_sizes


@dataclasses.dataclass(frozen=True)
class DeltaNetConfig:
    """Sizes of a gated delta net: linear attention whose state forgets and corrects.

    Args:
      num_key_heads: Number of query and key heads.
      num_value_heads: Number of value heads; each key head serves equally many.
      key_head_dim: Width of a query or key head.
      value_head_dim: Width of a value head.
      kernel_size: Number of tokens that the convolution before it sees.
      decay_by_dim: Whether each dim of a key head has a decay; else the head has one.
      decay_rank: Width of the vectors from which decays of each dim are projected; None
        to project decays from the token.
      decay_bound: Least logarithm of a decay, negative, which a sigmoid multiplies;
        None for decays without a bound.
      gate_rank: Width of the vectors from which the gate of the output is projected;
        None to project it from the token.
      gate_activation: Activation of that gate.
      beta_factor: Factor of what is learned of a token; above 1, the state can turn.
      norm_eps: Epsilon of the norm of the output; None for that of the config.

    Raises:
      ValueError: If a size is not a positive integer, or the key heads do not divide
        the value heads.

    Source: Gated Delta Networks, https://arxiv.org/abs/2412.06464; Kimi Linear,
      https://arxiv.org/abs/2510.26692, for decays of each dim.
    """

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    kernel_size: int = 4
    decay_by_dim: bool = False
    decay_rank: int | None = None
    decay_bound: float | None = None
    gate_rank: int | None = None
    gate_activation: Literal["silu", "sigmoid"] = "silu"
    beta_factor: float = 1.0
    norm_eps: float | None = None

    def __post_init__(self):
        """Validates the sizes."""
        wrong = wrong_fields(self) or wrong_sizes(self, _SIZES)
        if not wrong and self.num_value_heads % self.num_key_heads:
            wrong = [
                f"num_value_heads {self.num_value_heads} is not a multiple of "
                f"num_key_heads {self.num_key_heads}"
            ]
        if (
            not wrong
            and self.decay_by_dim
            and self.num_value_heads != self.num_key_heads
        ):
            wrong = [
                f"decay_by_dim: num_key_heads {self.num_key_heads} are "
                f"as many as num_value_heads {self.num_value_heads}"
            ]
        if self.decay_rank is not None and not self.decay_by_dim:
            wrong = [*wrong, "decay_rank: decay_by_dim is not set"]
        bound = self.decay_bound
        if isinstance(bound, int | float) and not bound < 0:
            wrong = [*wrong, f"decay_bound {self.decay_bound} is not negative"]
        raise_if("DeltaNetConfig", wrong)


_SIZES = (
    "num_key_heads",
    "num_value_heads",
    "key_head_dim",
    "value_head_dim",
    "kernel_size",
    "decay_rank",
    "gate_rank",
)
