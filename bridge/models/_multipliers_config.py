"""Config of factors inside of layers, as of maximal update parametrization."""

import dataclasses

from bridge.models._checks import raise_if, wrong_fields


@dataclasses.dataclass(frozen=True)
class MultipliersConfig:
    """Factors of what enters and leaves the parts of a layer.

    Args:
      attention_in: Factor of the input of attention.
      attention_out: Factor of its output.
      key: Factor of its keys.
      value: Factor of its values.
      mamba_in: Factor of the input of a Mamba mixer.
      mamba_out: Factor of its output.
      mamba_projections: Factors of its gate, its channels, its projections into and of
        the state, and its time step.
      gate: Factor of the gate of an MLP, before its activation.
      down: Factor of the output of an MLP.

    Raises:
      ValueError: If a field has an invalid value.

    Source: transformers `modeling_falcon_h1.py`, `modeling_mimo_v2_flash.py`.
    """

    attention_in: float = 1.0
    attention_out: float = 1.0
    key: float = 1.0
    value: float = 1.0
    mamba_in: float = 1.0
    mamba_out: float = 1.0
    mamba_projections: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0, 1.0)
    gate: float = 1.0
    down: float = 1.0

    def __post_init__(self):
        """Validates the fields."""
        wrong = wrong_fields(self)
        if not wrong and len(self.mamba_projections) != 5:
            count = len(self.mamba_projections)
            wrong = [f"mamba_projections has {count} factors of 5"]
        raise_if("MultipliersConfig", wrong)
