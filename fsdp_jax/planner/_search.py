"""Searches schedules of a step by compiling and replaying them."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdp_jax._report import Grid, format_bytes, html_document, html_page
from fsdp_jax.planner._accuracy import PUBLISHED
from fsdp_jax.planner._step_estimate import StepEstimate

Settings = Mapping[str, Any]

NOTICED = 1e-3
"""Part of a step by which a schedule must be faster to replace another."""


@dataclasses.dataclass(frozen=True)
class Knob:
    """A setting of a step that changes its schedule, and no number.

    Attributes:
      name: Name of the setting.
      values: Values to try.
      measured: Whether the replay knows what it does on GPUs. If not, it is shown what
        the compiler makes of it, and it is never chosen.
      beside: Settings that it is tried with, in place of the best, if not `measured`.
    """

    name: str
    values: tuple[Any, ...]
    measured: bool = True
    beside: Settings = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Trial:
    """One schedule that was tried.

    Attributes:
      changed: Settings that differ from the default.
      estimate: Estimate; None if these settings are not possible together.
      reason: Why there is none; "" if there is one.
      measured: Whether the replay knows what the settings do on GPUs.
    """

    changed: Settings
    estimate: StepEstimate | None
    reason: str = ""
    measured: bool = True

    @property
    def name(self) -> str:
        """Settings that differ from the default."""
        return ", ".join(f"{k}={v}" for k, v in self.changed.items()) or "default"

    def is_better(self, other: Trial) -> bool:
        """Returns whether this one fits and `other` does not, or is faster."""
        mine, theirs = self.estimate, other.estimate
        if mine is None or theirs is None:
            return theirs is None and mine is not None
        if mine.fits != theirs.fits:
            return mine.fits
        faster = theirs.timeline.seconds * (1 - NOTICED)
        return mine.timeline.seconds < faster


@dataclasses.dataclass(frozen=True, repr=False)
class Search:
    """Schedules of one step, with the best one.

    `print(search)` shows them as a table, with what is gained.

    Attributes:
      trials: All that were tried, the default first.
      best: Fastest that fits, of those whose effect on GPUs is modelled.
      complete: Whether the budget was enough for all.
      seconds: Seconds that the search took.
    """

    trials: tuple[Trial, ...]
    best: Trial
    complete: bool
    seconds: float

    @property
    def gain(self) -> float:
        """Part of the default's step that the best one saves, as modelled."""
        default, best = _of(self.trials[0]), _of(self.best)
        return 1 - best.timeline.seconds / default.timeline.seconds

    def to_dict(self) -> dict[str, Any]:
        """Returns the best estimate as JSON values, and the search beside it."""
        return _of(self.best).to_dict() | {
            "search": {
                "best": dict(self.best.changed),
                "gain": self.gain,
                "complete": self.complete,
                "seconds": self.seconds,
                "trials": [_values(trial) for trial in self.trials],
            }
        }

    def save_json(self, path: str | Path) -> None:
        """Writes `to_dict()` to a file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    def save_html(self, path: str | Path) -> None:
        """Writes tables and conclusion to a file for a browser."""
        title = f"Schedules: {_of(self.best).title}"
        Path(path).write_text(html_document(title, self._repr_html_()))

    def __repr__(self) -> str:
        """Formats tables and conclusion as text."""
        parts = (
            part if isinstance(part, str) else part.as_text() for part in _parts(self)
        )
        return "\n".join(parts)

    def _repr_html_(self) -> str:
        """Formats tables and conclusion as HTML."""
        return html_page([part for part in _parts(self) if part])


def search_schedules(
    estimate: Callable[[Settings], StepEstimate],
    start: Settings,
    knobs: Sequence[Knob],
    *,
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> Search:
    """Searches the settings whose compiled step is fastest when it is replayed.

    Coordinate descent: the values of one knob are tried with the best of all others,
    until a round over all knobs changes nothing. Then the knobs whose effect is not
    modelled are tried with the best settings, to show what the compiler makes of them.

    Args:
      estimate: Function that compiles the step with these settings, and replays it. A
        `ValueError` means that they are not possible together.
      start: Settings of the default.
      knobs: Settings to change, those that gain most first.
      seconds: Budget. No trial is begun that would not end in time if it took as long
        as the longest one before it. The default is always tried.
      clock: Function that returns the seconds that have passed.

    Returns:
      All that was tried, and the best.

    Raises:
      ValueError: If the default itself is not possible.
    """
    searcher = _Searcher(estimate, dict(start), seconds, clock)
    searcher.descend([knob for knob in knobs if knob.measured])
    for knob in knobs:
        if not knob.measured:
            searcher.show(knob)
    return Search(
        tuple(searcher.trials), searcher.best, searcher.complete, searcher.used
    )


class _Searcher:
    """Schedules tried so far, the best of them, and the rest of the budget."""

    def __init__(
        self,
        estimate: Callable[[Settings], StepEstimate],
        start: Settings,
        seconds: float,
        clock: Callable[[], float],
    ):
        self._estimate, self._clock = estimate, clock
        self._start, self._budget = start, seconds
        self._began = clock()
        self._longest = 0.0
        self.complete = True
        self.best = Trial({}, estimate(start))
        self._longest = self.used
        self.trials = [self.best]
        self._tried = [start]

    @property
    def used(self) -> float:
        """Seconds since the search began."""
        return self._clock() - self._began

    @property
    def settings(self) -> Settings:
        """Settings of the best."""
        return {**self._start, **self.best.changed}

    def descend(self, knobs: Sequence[Knob]) -> None:
        """Changes one knob at a time, until none is worth changing."""
        before = None
        while before is not self.best:
            before = self.best
            for knob in knobs:
                self._improve(knob)

    def show(self, knob: Knob) -> None:
        """Tries a knob with the best settings, without choosing it."""
        for value in knob.values:
            if trial := self._try({**self.settings, **knob.beside, knob.name: value}):
                self.trials[-1] = dataclasses.replace(trial, measured=False)

    def _improve(self, knob: Knob) -> None:
        around = self.settings
        for value in knob.values:
            trial = self._try({**around, knob.name: value})
            if trial and trial.is_better(self.best):
                self.best = trial

    def _try(self, settings: Settings) -> Trial | None:
        """Returns the trial of settings; None for a second one, or after the budget."""
        if settings in self._tried:
            return None
        if self.used + self._longest > self._budget:
            self.complete = False
            return None
        began = self.used
        changed = {k: v for k, v in settings.items() if v != self._start[k]}
        try:
            trial = Trial(changed, self._estimate(settings))
        except ValueError as error:
            trial = Trial(changed, None, str(error))
        self._longest = max(self._longest, self.used - began)
        self._tried.append(settings)
        self.trials.append(trial)
        return trial


_COLUMNS = {
    "schedule": "left",
    "memory a GPU": "right",
    "exposed": "right",
    "collectives": "right",
    "step ms": "right",
    "against the default": "right",
}


def _parts(search: Search) -> list[Grid | str]:
    known = [trial for trial in search.trials if trial.measured]
    shown = [trial for trial in search.trials if not trial.measured]
    parts: list[Grid | str] = [_grid(search, known), ""]
    if shown:
        parts += [
            "What the compiler makes of these is below; what they do on GPUs is not "
            "modelled, and was not measured. They are not chosen:",
            _grid(search, shown),
            "",
        ]
    parts += [
        f"not possible: {trial.name}: {trial.reason}"
        for trial in search.trials
        if trial.estimate is None
    ]
    if not search.complete:
        parts.append(
            f"The budget ended the search after {len(search.trials)} schedules."
        )
    return [*parts, _conclusion(search)]


def _grid(search: Search, trials: Sequence[Trial]) -> Grid:
    found = [trial for trial in trials if trial.estimate is not None]
    found.sort(key=lambda trial: (not _of(trial).fits, _of(trial).timeline.seconds))
    default = _of(search.trials[0]).timeline.seconds
    rows = [_cells(trial, default) for trial in found]
    return Grid(_COLUMNS, rows, [1 / _of(trial).timeline.seconds for trial in found])


def _cells(trial: Trial, default: float) -> tuple[str, ...]:
    found = _of(trial)
    change = found.timeline.seconds / default - 1
    return (
        trial.name,
        format_bytes(found.compiled_bytes) + ("" if found.fits else " DOES NOT FIT"),
        f"{found.exposed:.1%}",
        f"{len(found.timeline.sent):,}",
        f"{found.timeline.seconds * 1e3:,.1f}",
        f"{change:+.1%}",
    )


def _conclusion(search: Search) -> str:
    tried = sum(trial.measured for trial in search.trials)
    if not _of(search.best).fits:
        return f"none of the {tried} schedules fits; the best is {search.best.name}"
    if search.best is search.trials[0]:
        return f"the default is the best of {tried} schedules"
    error = PUBLISHED.held_back_percentile_90
    gained = f"{search.gain:.1%} of the default's step"
    if not _of(search.trials[0]).fits:
        gained = "that it fits, which the default does not"
    return (
        f"best of {tried} schedules: {search.best.name}. It gains {gained}, as "
        f"modelled; estimates of a step are off by up to {error:.0%}, and how much of "
        "that two schedules of one step share is not known: measure both"
    )


def _of(trial: Trial) -> StepEstimate:
    assert trial.estimate is not None
    return trial.estimate


def _values(trial: Trial) -> dict[str, Any]:
    found = trial.estimate
    return {
        "changed": dict(trial.changed),
        "measured": trial.measured,
        "reason": trial.reason,
        "fits": found and found.fits,
        "memory_compiled": found and found.compiled_bytes,
        "step_seconds": found and found.timeline.seconds,
        "exposed_seconds": found and found.timeline.exposed_seconds,
        "collectives": found and len(found.timeline.sent),
    }
