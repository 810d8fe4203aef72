"""Config of layers that attend to the keys and values of an earlier layer."""

import dataclasses

from bridge.models._checks import raise_if, wrong_fields, wrong_sizes


@dataclasses.dataclass(frozen=True)
class KVSharingConfig:
    """Last layers of a decoder, which project no keys and values of their own.

    Each attends to those of the last layer before them all that is of its type:
    sliding, or full.

    Args:
      num_layers: Number of these layers.
      intermediate_size: Width inside their MLPs.

    Raises:
      ValueError: If a field has an invalid value.

    Source: transformers `configuration_gemma4.py::Gemma4TextConfig.kv_sharing_modes`.
    """

    num_layers: int
    intermediate_size: int

    def __post_init__(self):
        """Validates the fields."""
        sizes = ("num_layers", "intermediate_size")
        wrong = wrong_fields(self) or wrong_sizes(self, sizes)
        raise_if("KVSharingConfig", wrong)
