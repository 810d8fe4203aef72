"""Config of a short convolution."""

import dataclasses

from bridge.models._checks import raise_if, wrong_fields, wrong_sizes


@dataclasses.dataclass(frozen=True)
class ShortConvConfig:
    """Sizes of a gated short convolution over the last few tokens.

    Args:
      kernel_size: Number of tokens that a token sees, including itself.
      bias: Whether projections and convolution have biases.

    Raises:
      ValueError: If a field has an invalid value.

    Source: transformers `modeling_lfm2.py::Lfm2ShortConv`.
    """

    kernel_size: int = 3
    bias: bool = False

    def __post_init__(self):
        """Validates the fields."""
        wrong = wrong_fields(self) or wrong_sizes(self, ("kernel_size",))
        raise_if("ShortConvConfig", wrong)
