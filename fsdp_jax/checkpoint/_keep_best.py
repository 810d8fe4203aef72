"""Keeps the steps that are best by a number in their metadata."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax.numpy as jnp
import numpy as np
from orbax.checkpoint.checkpoint_managers import PreservationPolicy

from fsdp_jax._option_types import is_whole
from fsdp_jax.checkpoint._load import load_metadata
from fsdp_jax.checkpoint._manifest import DamagedCheckpointError
from fsdp_jax.checkpoint._paths import as_path

Best = Literal["least", "greatest"]


@dataclasses.dataclass(frozen=True)
class KeepBest(PreservationPolicy):
    """Preservation policy: keeps the steps whose metadata has the best values.

    `Checkpointer.save(..., metadata={"eval_loss": loss})` says how good a step is.
    The newest step is kept too: it is still being written when Orbax asks. Other steps
    without the number are not, where some step has it; Orbax's `AnyPreservationPolicy`
    joins policies. Where none has it, all are kept, and so is a step whose metadata
    cannot be read: nothing is deleted that was not compared. The log says so.

    Attributes:
      path: Directory of the checkpoints.
      name: Key of the number in the metadata: a Python or numpy number, or an array of
        one.
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
    best: Best = "least"

    def __post_init__(self):
        """Checks the fields.

        Raises:
          ValueError: If the path is a URL of another scheme than `gs` and `s3`, the
            number is not positive, or `best` is none of its two values.
        """
        as_path(self.path)
        if not is_whole(self.n) or self.n < 1:
            raise ValueError(
                f"KeepBest(n={self.n!r}) must be a whole number, at least 1."
            )
        if self.best not in get_args(Best):
            raise ValueError(
                f"KeepBest(best={self.best!r}) must be one of {get_args(Best)}."
            )

    def should_preserve(
        self, checkpoints: Sequence[Any], *, context: Any
    ) -> Sequence[bool]:
        """Returns whether each step is among the best, for Orbax.

        Args:
          checkpoints: Steps in order.
          context: Not used.
        """
        values, kept = {}, {len(checkpoints) - 1}
        for i, each in enumerate(checkpoints):
            try:
                value = self._value(each.step)
            except (ValueError, OSError, DamagedCheckpointError) as error:
                self._say_unread(each.step, error, is_newest=i in kept)
                kept.add(i)
            else:
                values |= {} if value is None else {i: value}
        if not values and len(checkpoints) > len(kept):
            logging.getLogger("fsdp_jax").warning(
                "KeepBest: no step of '%s' has a number %r in its metadata, so all are "
                "kept.",
                self.path,
                self.name,
            )
            return [True] * len(checkpoints)
        sign = 1 if self.best == "least" else -1
        # Of equal values the later step is better: it was trained for longer.
        order = sorted(values, key=lambda i: (sign * values[i], -i))
        kept.update(order[: self.n])
        return [i in kept for i in range(len(checkpoints))]

    def _value(self, step: int) -> float | None:
        """Returns the number of a step; None if it has none that is finite."""
        value = load_metadata(self.path, step=step).get(self.name)
        if value is None or np.size(value) != 1:
            return None
        number = np.asarray(value)
        kinds = jnp.integer, jnp.floating
        if not any(jnp.issubdtype(number.dtype, kind) for kind in kinds):
            return None
        return float(number.item()) if math.isfinite(number.item()) else None

    def _say_unread(self, step: int, error: Exception, *, is_newest: bool) -> None:
        if not is_newest:  # It is being written.
            logging.getLogger("fsdp_jax").warning(
                "KeepBest: step %d is kept, since its metadata cannot be read. %s",
                step,
                error,
            )
