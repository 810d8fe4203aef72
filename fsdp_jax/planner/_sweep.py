"""Estimates of one training step under several strategies, side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from fsdp_jax._report import Grid, format_bytes, html_page
from fsdp_jax.planner._accuracy import overlap, seconds_range
from fsdp_jax.planner._step_estimate import StepEstimate


@dataclasses.dataclass(frozen=True, repr=False)
class Sweep:
    """Comparison of estimates of the same step, the best first.

    `print(sweep)` shows it as a table, with a recommendation.

    Args:
      estimates: Estimates from `estimate_step` by name. They must have the same batch,
        since they are compared by step time.

    Attributes:
      estimates: Estimates by name; those that fit first, then by step time.

    Raises:
      ValueError: If there is none.
    """

    estimates: Mapping[str, StepEstimate]

    def __post_init__(self):
        """Sorts the estimates."""
        if not self.estimates:
            raise ValueError("A Sweep compares estimates, got 0: give at least 1.")
        found = sorted(
            self.estimates.items(),
            key=lambda pair: (not pair[1].fits, pair[1].timeline.seconds),
        )
        object.__setattr__(self, "estimates", dict(found))

    @property
    def recommended(self) -> str | None:
        """Name of the fastest estimate that fits; None if none does."""
        name, best = next(iter(self.estimates.items()))
        return name if best.fits else None

    @property
    def ties(self) -> tuple[str, ...]:
        """Names of those that fit and whose ranges overlap the recommended one's."""
        if self.recommended is None:
            return ()
        best = _range(self.estimates[self.recommended])
        return tuple(
            name
            for name, found in self.estimates.items()
            if found.fits and name != self.recommended and overlap(_range(found), best)
        )

    def __repr__(self) -> str:
        """Formats table and recommendation as text."""
        return "\n".join([_grid(self).as_text(), "", *_ties(self), _advice(self)])

    def _repr_html_(self) -> str:
        """Formats table and recommendation as HTML, with bars for the speed."""
        return html_page([_grid(self), *_ties(self), _advice(self)])


_COLUMNS = {
    "": "left",
    "memory a GPU": "right",
    "step ms": "right",
    "range": "right",
    "exposed": "right",
    "MFU": "right",
    "tokens/s/GPU": "right",
}


def _grid(sweep: Sweep) -> Grid:
    # With equal batches, tokens per second are inversely proportional to step time.
    speeds = [1 / found.timeline.seconds for found in sweep.estimates.values()]
    rows = [_cells(name, found) for name, found in sweep.estimates.items()]
    return Grid(_COLUMNS, rows, speeds)


def _range(found: StepEstimate) -> tuple[float, float]:
    return seconds_range(found.timeline.seconds)


def _cells(name: str, found: StepEstimate) -> tuple[str, ...]:
    rate = found.tokens_per_second
    return (
        name,
        format_bytes(found.compiled_bytes) + ("" if found.fits else " DOES NOT FIT"),
        f"{found.timeline.seconds * 1e3:,.1f}",
        "{:,.0f} to {:,.0f}".format(*(end * 1e3 for end in _range(found))),
        f"{found.exposed:.1%}",
        f"{found.mfu:.1%}",
        "?" if rate is None else f"{rate / found.num_gpus:,.0f}",
    )


def _advice(sweep: Sweep) -> str:
    if sweep.recommended is None:
        return (
            "recommended: none of these fits. Use more GPUs or shorter rows, or keep "
            "less for backward: remat_policy=nothing_saveable, --remat nothing."
        )
    return f"recommended: {sweep.recommended}"


def _ties(sweep: Sweep) -> list[str]:
    if not sweep.ties:
        return []
    names = "; ".join(sweep.ties)
    return [
        "Within the error of the estimates these tie with the recommended one, and "
        f"only a measurement tells them apart: {names}"
    ]
