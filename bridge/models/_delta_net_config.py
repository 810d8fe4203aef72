"""Config of a gated delta net."""

import dataclasses

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

    Raises:
      ValueError: If a size is not a positive integer, or the key heads do not divide
        the value heads.

    Source: Gated Delta Networks, https://arxiv.org/abs/2412.06464.
    """

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    kernel_size: int = 4

    def __post_init__(self):
        """Validates the sizes."""
        names = tuple(field.name for field in dataclasses.fields(self))
        wrong = wrong_fields(self) or wrong_sizes(self, names)
        if not wrong and self.num_value_heads % self.num_key_heads:
            wrong = [
                f"num_value_heads {self.num_value_heads} is not a multiple of "
                f"num_key_heads {self.num_key_heads}"
            ]
        raise_if("DeltaNetConfig", wrong)
