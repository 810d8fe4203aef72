"""`fsdp-jax diff-metrics`: the losses of two runs side by side."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import tyro

from fsdp_jax._report import text_table
from fsdp_jax.cli._errors import CheckFailed, check_tolerance
from fsdp_jax.cli._metrics import read_losses


@dataclasses.dataclass(frozen=True)
class DiffMetrics:
    """Show the losses of two runs side by side, for the steps that both have.

    Attributes:
      first: A file of `fsdp-jax train --metrics`.
      second: Another.
      tolerance: Fails if a loss differs by more than this share of the first's. One
        that is not finite differs from all others.
    """

    first: tyro.conf.Positional[Path]
    second: tyro.conf.Positional[Path]
    tolerance: float = math.inf

    def run(self) -> None:
        """Prints the table and the largest difference."""
        check_tolerance(self.tolerance)
        first, second = read_losses(self.first), read_losses(self.second)
        common = sorted(first.keys() & second.keys())
        if not common:
            raise ValueError(f"'{self.first}' and '{self.second}' share no step.")
        apart = [_difference(first[step], second[step]) for step in common]
        rows = [
            (str(step), f"{first[step]:.7f}", f"{second[step]:.7f}", f"{share:.1e}")
            for step, share in zip(common, apart, strict=True)
        ]
        print(text_table(_COLUMNS, rows))
        print(f"largest relative difference: {max(apart):.2g}")
        if max(apart) > self.tolerance:
            wrong = [
                s for s, n in zip(common, apart, strict=True) if n > self.tolerance
            ]
            raise CheckFailed(
                f"The losses differ by more than --tolerance {self.tolerance:g} in "
                f"{len(wrong)} step(s), first in step {wrong[0]}."
            )


def _difference(first: float, second: float) -> float:
    """Returns the difference of two losses as a share of the first."""
    if not (math.isfinite(first) and math.isfinite(second)):
        return math.inf
    if first == second:
        return 0.0
    return abs(second - first) / abs(first) if first else math.inf


_COLUMNS = {
    "step": "right",
    "first loss": "right",
    "second loss": "right",
    "difference": "right",
}
