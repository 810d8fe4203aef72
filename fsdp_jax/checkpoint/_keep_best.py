"""Keeps the steps that are best by a number in their metadata."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from typing import Any, Literal

from orbax.checkpoint.checkpoint_managers import PreservationPolicy

from fsdp_jax.checkpoint._load import load_metadata
from fsdp_jax.checkpoint._manifest import DamagedCheckpointError
from fsdp_jax.checkpoint._paths import as_path


@dataclasses.dataclass(frozen=True)
class KeepBest(PreservationPolicy):
    """Preservation policy: keeps the steps whose metadata has the best values.

    `Checkpointer.save(..., metadata={"eval_loss": loss})` says how good a step is.
    The newest step is kept too: it is still being written when Orbax asks. Other steps
    without the number are not; Orbax's `AnyPreservationPolicy` joins policies.

    Attributes:
      path: Directory of the checkpoints.
      name: Key of the number in the metadata.
      n: Number of steps to keep.
      best: Whether the least or the greatest values are best.

    Examples:
      >>> best = fsdp.checkpoint.KeepBest(path, "eval_loss", n=2)
      >>> with fsdp.Checkpointer(path, preservation_policy=best) as checkpointer:
      ...     checkpointer.save(0, state, metadata={"eval_loss": 2.5})
      True
    """

    path: str | os.PathLike[str]
    name: str
    n: int = 1
    best: Literal["least", "greatest"] = "least"

    def __post_init__(self):
        """Checks the path and the number of steps.

        Raises:
          ValueError: If the path is a URL of another scheme than `gs` and `s3`, or the
            number is not positive.
        """
        as_path(self.path)
        if self.n < 1:
            raise ValueError(f"KeepBest(n={self.n}) must be at least 1.")

    def should_preserve(
        self, checkpoints: Sequence[Any], *, context: Any
    ) -> Sequence[bool]:
        """Returns whether each step is among the best, for Orbax.

        Args:
          checkpoints: Steps in order.
          context: Not used.
        """
        values = [self._value(each.step) for each in checkpoints]
        # Of equal values the later step is better: it was trained for longer.
        order = sorted(range(len(values)), key=lambda i: (values[i], -i))
        kept = {i for i in order[: self.n] if values[i] < math.inf}
        kept.add(len(values) - 1)
        return [i in kept for i in range(len(values))]

    def _value(self, step: int) -> float:
        """Returns what is least for the best step; infinity without a number."""
        try:
            value = load_metadata(self.path, step=step).get(self.name)
        except (ValueError, OSError, DamagedCheckpointError):
            return math.inf  # Being written, or damaged.
        if not isinstance(value, int | float) or not math.isfinite(value):
            return math.inf
        return value if self.best == "least" else -value
