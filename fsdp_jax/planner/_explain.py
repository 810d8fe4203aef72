"""A profile of a real run beside the plan's replay, unit by unit."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdp_jax._report import Grid, html_page
from fsdp_jax.planner._profile import UNKNOWN, ProfiledStep
from fsdp_jax.planner._unit_times import COMPUTE, UnitTime, unit_times_of


@dataclasses.dataclass(frozen=True)
class PlannedStep:
    """Times of a planned step, as `fsdp-jax plan --json` writes them.

    Attributes:
      seconds: Modelled seconds of a step.
      times: Modelled seconds by unit and kind of work.
      title: GPUs and mesh of the plan.
    """

    seconds: float
    times: tuple[UnitTime, ...]
    title: str


def read_plan(path: str | Path) -> PlannedStep:
    """Reads the JSON of `fsdp-jax plan --json`.

    Raises:
      ValueError: If it has no times of units.
    """
    try:
        found = json.loads(Path(path).read_text())
        return PlannedStep(
            found["step_seconds"], unit_times_of(found["unit_times"]), found["title"]
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"'{path}' has no modelled times of units ({error!r}). Write it with "
            "fsdp-jax plan --json, where XLA's compiler for GPUs is installed."
        ) from error


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation:
    """Time of a profiled step by its parts, beside that of the plan.

    `print(explanation)` shows it as a table.

    Attributes:
      profiled: Mean step of the profile.
      planned: Modelled step; None to show the profile alone.
    """

    profiled: ProfiledStep
    planned: PlannedStep | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns both as JSON values, in seconds."""
        return dataclasses.asdict(self)

    def __repr__(self) -> str:
        """Formats headline and table as text."""
        return "\n".join([*_headline(self), "", _grid(self).as_text()])

    def _repr_html_(self) -> str:
        """Formats headline and table as HTML, with bars for the measured seconds."""
        return html_page([*_headline(self), _grid(self)])


def _headline(found: Explanation) -> list[str]:
    step = found.profiled
    of = f" of {step.module}" if step.module else ""
    lines = [
        f"{step.device}: {step.steps} step(s){of}, {step.seconds * 1e3:,.1f} ms each, "
        f"{_exposed(step.times) * 1e3:,.1f} ms of it exposed communication"
    ]
    if found.planned is not None:
        seconds = found.planned.seconds
        lines.append(
            f"planned for {found.planned.title}: {seconds * 1e3:,.1f} ms, "
            f"{_exposed(found.planned.times) * 1e3:,.1f} ms of it exposed; measured / "
            f"planned: {step.seconds / seconds:.2f}"
        )
    idle = step.seconds - _busy(step.times)
    lines.append(f"nothing runs on the GPU for {max(idle, 0.0) * 1e3:,.1f} ms a step")
    if step.others:
        lines.append(f"other programs: {step.others * 1e3:,.1f} ms in all")
    if unknown := sum(one.seconds for one in step.times if one.unit == UNKNOWN):
        lines.append(
            f"'{UNKNOWN}': kernels of {unknown * 1e3:,.1f} ms a step do not say what "
            "they are of, as those of CUDA graphs. To see them, compile with "
            'xla_gpu_enable_command_buffer=""'
        )
    return lines


def _exposed(times: Sequence[UnitTime]) -> float:
    return sum(one.exposed_seconds for one in times)


def _busy(times: Sequence[UnitTime]) -> float:
    computing = sum(one.seconds for one in times if one.work == COMPUTE)
    return computing + _exposed(times)


_COLUMNS = {
    "unit": "left",
    "work": "left",
    "times": "right",
    "exposed ms": "right",
    "ms": "right",
}
_BESIDE = {
    "unit": "left",
    "work": "left",
    "times": "right",
    "planned": "right",
    "exposed ms": "right",
    "planned exposed": "right",
    "planned ms": "right",
    "measured / planned": "right",
    "ms": "right",
}


def _grid(found: Explanation) -> Grid:
    measured = _by_key(found.profiled.times)
    if found.planned is None:
        rows = [_alone(one) for one in measured.values()]
        return Grid(_COLUMNS, rows, [one.seconds for one in measured.values()])
    planned = _by_key(found.planned.times)
    keys = list(dict.fromkeys([*measured, *planned]))
    rows = [_beside(key, measured.get(key), planned.get(key)) for key in keys]
    sizes = [measured[key].seconds if key in measured else 0.0 for key in keys]
    return Grid(_BESIDE, rows, sizes)


def _by_key(times: Sequence[UnitTime]) -> Mapping[tuple[str, str], UnitTime]:
    """Returns the times by unit and work, the longest first."""
    ordered = sorted(times, key=lambda one: -one.seconds)
    return {(one.unit, one.work): one for one in ordered}


def _alone(one: UnitTime) -> tuple[str, ...]:
    return one.unit, one.work, _times(one), _exposed_ms(one), _ms(one.seconds)


def _beside(
    key: tuple[str, str], measured: UnitTime | None, planned: UnitTime | None
) -> tuple[str, ...]:
    ratio = "-"
    if measured and planned and planned.seconds:
        ratio = f"{measured.seconds / planned.seconds:.2f}"
    return (
        *key,
        _times(measured),
        _times(planned),
        _exposed_ms(measured),
        _exposed_ms(planned),
        _ms(planned.seconds) if planned else "-",
        ratio,
        _ms(measured.seconds) if measured else "-",
    )


def _times(one: UnitTime | None) -> str:
    return f"{one.times:,.0f}" if one and one.times else "-"


def _exposed_ms(one: UnitTime | None) -> str:
    return _ms(one.exposed_seconds) if one and one.work != COMPUTE else "-"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f}"
