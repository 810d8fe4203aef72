"""Config of a real-gated linear recurrent unit."""

import dataclasses

from bridge.models._checks import raise_if, wrong_fields, wrong_sizes


@dataclasses.dataclass(frozen=True)
class RGLRUConfig:
    """Sizes of a real-gated linear recurrent unit (RG-LRU).

    Args:
      num_heads: Number of blocks of channels; the gates of a channel see its block.
      head_dim: Number of channels of a block, each with a number as its state.
      kernel_size: Number of tokens that the convolution before it sees.

    Raises:
      ValueError: If a field has an invalid value.

    Source: Griffin, https://arxiv.org/abs/2402.19427, section 2.4.
    """

    num_heads: int
    head_dim: int
    kernel_size: int = 4

    def __post_init__(self):
        """Validates the sizes."""
        names = ("num_heads", "head_dim", "kernel_size")
        wrong = wrong_fields(self) or wrong_sizes(self, names)
        raise_if("RGLRUConfig", wrong)
