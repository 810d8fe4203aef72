"""Config of what an output projection reads in place of the normed stream."""

import dataclasses
from typing import Literal

from bridge.models._checks import raise_if, wrong_fields

Activation = Literal["silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu", "relu2"]


@dataclasses.dataclass(frozen=True)
class HeadTransformConfig:
    """Projection, activation and norm between the last norm and the head.

    Args:
      hidden_act: Activation.
      bias: Whether the projection has a bias.

    Raises:
      ValueError: If a field has an invalid value.

    Source: transformers
      `modeling_modernbert_decoder.py::ModernBertDecoderPredictionHead`.
    """

    hidden_act: Activation = "gelu"
    bias: bool = False

    def __post_init__(self):
        """Validates the fields."""
        raise_if("HeadTransformConfig", wrong_fields(self))
