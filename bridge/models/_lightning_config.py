"""Config of lightning attention."""

import dataclasses

from bridge.models._checks import raise_if, wrong_fields


@dataclasses.dataclass(frozen=True)
class LightningConfig:
    """Lightning attention: linear attention whose state decays by head and layer.

    Its heads are as many and as wide as those of attention.

    Args:
      stream_factor: Factor of the residual stream that its output is added to.
      output_factor: Factor of its output.

    Raises:
      ValueError: If a field has an invalid value.

    Source: MiniMax-01, https://arxiv.org/abs/2501.08313, section 2.2.
    """

    stream_factor: float = 1.0
    output_factor: float = 1.0

    def __post_init__(self):
        """Validates the fields."""
        raise_if("LightningConfig", wrong_fields(self))
