"""Config of the inputs that each layer has of each token."""

import dataclasses

from bridge.models._checks import raise_if, wrong_fields, wrong_sizes


@dataclasses.dataclass(frozen=True)
class PerLayerInputConfig:
    """Sizes of an embedding of tokens that has a part for each layer.

    Args:
      size: Width of the part of a layer.
      vocab_size: Number of rows of the embedding.

    Raises:
      ValueError: If a field has an invalid value.

    Source: transformers `modeling_gemma4.py::Gemma4TextModel`.
    """

    size: int
    vocab_size: int

    def __post_init__(self):
        """Validates the fields."""
        sizes = ("size", "vocab_size")
        wrong = wrong_fields(self) or wrong_sizes(self, sizes)
        raise_if("PerLayerInputConfig", wrong)
