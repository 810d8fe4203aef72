"""Config of the factors of the residual stream."""

import dataclasses

from bridge.models._checks import raise_if, wrong_fields


@dataclasses.dataclass(frozen=True)
class ResidualFactorsConfig:
    """Factors of the residual stream and of what is added to it.

    Args:
      attention_stream: Factor of the stream that the output of attention is added to.
      attention_output: Factor of that output.
      mlp_stream: Factor of the stream that the output of an MLP is added to.
      mlp_output: Factor of that output.

    Raises:
      ValueError: If a field has an invalid value.

    Source: DeepNorm, https://arxiv.org/abs/2203.00555; transformers
      `modeling_minimax.py::MiniMaxDecoderLayer`.
    """

    attention_stream: float = 1.0
    attention_output: float = 1.0
    mlp_stream: float = 1.0
    mlp_output: float = 1.0

    def __post_init__(self):
        """Validates the fields."""
        raise_if("ResidualFactorsConfig", wrong_fields(self))
