"""Estimates of one training step under several strategies, side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import jax

from fsdp_jax._report import Grid, format_bytes, html_document, html_page
from fsdp_jax.planner._accuracy import overlap, seconds_range
from fsdp_jax.planner._plot_sweep import Bar, draw_sweep
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

    @property
    def equal(self) -> tuple[tuple[str, ...], ...]:
        """Names of those that compile to one and the same schedule, in groups."""
        groups: dict[tuple[float, int], list[str]] = {}
        for name, found in self.estimates.items():
            key = found.timeline.seconds, found.compiled_bytes
            groups.setdefault(key, []).append(name)
        return tuple(tuple(names) for names in groups.values() if len(names) > 1)

    @property
    def title(self) -> str:
        """GPUs, size of the model and of the batch."""
        best = next(iter(self.estimates.values()))
        tokens = "" if best.tokens is None else f", {best.tokens:,} tokens a step"
        gpus = f"{best.num_gpus} x {best.gpu.description}"
        return f"{gpus}, {best.num_params / 1e9:,.2f} billion parameters{tokens}"

    def save_html(self, path: str | Path) -> None:
        """Writes table and recommendation to a file for a browser."""
        Path(path).write_text(html_document(self.title, self._repr_html_()))

    def save_picture(self, path: str | Path) -> None:
        """Plots time and memory of all estimates, PNG or SVG by the suffix."""
        bars = [
            Bar(
                name=name,
                seconds=found.timeline.seconds,
                exposed=found.timeline.exposed_seconds,
                range=_range(found),
                memory=found.compiled_bytes,
                fits=found.fits,
            )
            for name, found in self.estimates.items()
        ]
        memory = next(iter(self.estimates.values())).gpu.memory
        draw_sweep(bars, memory, path, title=self.title)

    def __repr__(self) -> str:
        """Formats table and recommendation as text."""
        return "\n".join([_grid(self).as_text(), "", *_remarks(self)])

    def _repr_html_(self) -> str:
        """Formats table and recommendation as HTML, with bars for the speed."""
        return html_page([_grid(self), *_remarks(self)])


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


def _remarks(sweep: Sweep) -> list[str]:
    return [*_equal(sweep), *_ties(sweep), _advice(sweep)]


def _equal(sweep: Sweep) -> list[str]:
    """Says which estimates are of one program, and why ZeRO-1 and ZeRO-2 may be."""
    lines = []
    for names in sweep.equal:
        found = [sweep.estimates[name] for name in names]
        zeros = {str(one.plan.config.zero_dp_strategy) for one in found}
        why = ""
        if zeros == {"optim", "optim_grads"} and found[0].num_microbatches == 1:
            why = (
                ": with one microbatch there is no sum of gradients that one of them "
                "would keep unsharded; with --microbatches they differ"
            )
        lines.append(f"{' and '.join(names)} compile to the same step{why}.")
    return lines


def _advice(sweep: Sweep) -> str:
    if sweep.recommended is not None:
        return f"recommended: {sweep.recommended}"
    policies = {found.plan.config.remat_policy for found in sweep.estimates.values()}
    less = ", or keep less for backward: remat_policy=nothing_saveable, --remat nothing"
    tried = jax.checkpoint_policies.nothing_saveable in policies
    return (
        "recommended: none of these fits. Use more GPUs, or fewer or shorter rows for "
        f"each{'' if tried else less}."
    )


def _ties(sweep: Sweep) -> list[str]:
    if not sweep.ties:
        return []
    names = "; ".join(sweep.ties)
    return [
        "Within the error of the estimates these tie with the recommended one, and "
        f"only a measurement tells them apart: {names}"
    ]
