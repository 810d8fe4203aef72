"""Config of a factor of queries that grows with their position."""

import dataclasses

from bridge.models._checks import raise_if, wrong_fields, wrong_sizes


@dataclasses.dataclass(frozen=True)
class QueryScaleConfig:
    """Config of the factor `1 + beta * log(1 + floor((position + offset) / length))`.

    Args:
      beta: Weight of the logarithm.
      length: Number of positions after which the factor grows.
      offset: Number that is added to positions, which are from 0 on.
      no_rope_only: Whether only layers without rotary embedding have the factor.

    Raises:
      ValueError: If a field has an invalid value.

    Source: transformers `modeling_ministral3.py::get_llama_4_attn_scale`,
      `modeling_llama4.py::Llama4TextAttention`.
    """

    beta: float
    length: int
    offset: int = 0
    no_rope_only: bool = False

    def __post_init__(self):
        """Validates the fields."""
        wrong = wrong_fields(self) or wrong_sizes(self, ("length",))
        raise_if("QueryScaleConfig", wrong)
