"""Config of several residual streams, of which each layer computes one."""

import dataclasses

from bridge.models._checks import raise_if, wrong_fields, wrong_sizes


@dataclasses.dataclass(frozen=True)
class AltUpConfig:
    """Residual streams of alternating updates (AltUp).

    A layer predicts all streams from those before it, runs on one, and corrects the
    others by what that one turned out to be.

    Args:
      num_streams: Number of residual streams, at least 2.
      active: Index of the stream that layers run on.

    Raises:
      ValueError: If a field has an invalid value.

    Source: AltUp (arXiv:2301.13310); transformers
      `modeling_gemma3n.py::Gemma3nTextAltUp`.
    """

    num_streams: int
    active: int = 0

    def __post_init__(self):
        """Validates the fields."""
        wrong = wrong_fields(self) or wrong_sizes(self, ("num_streams",))
        if not wrong and self.num_streams < 2:
            wrong = [f"num_streams {self.num_streams}: at least 2"]
        if not wrong and not 0 <= self.active < self.num_streams:
            wrong = [f"active {self.active}: one of the {self.num_streams} streams"]
        raise_if("AltUpConfig", wrong)
