"""Metrics of training steps: one JSON object a line."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import jax


@dataclasses.dataclass(frozen=True)
class StepMetrics:
    """What is known after a step.

    Attributes:
      step: Updates made so far, this one included.
      loss: Mean over the global batch, before the update.
      grad_norm: Norm of the gradient; not finite in a step that a loss scale skipped.
      tokens_per_sec: Of all devices; the first step's counts compilation too.
      step_secs: Seconds from batch to metrics.
      peak_memory_bytes: The largest so far: of the fullest GPU, or of the process
        where devices are simulated.
      loss_scale: The factor of the loss in this step; None if it has none.
      routers: Of a model with experts: its loss without what balances them, and the
        figures of `router_losses`; empty for others.
    """

    step: int
    loss: float
    grad_norm: float
    tokens_per_sec: float
    step_secs: float
    peak_memory_bytes: int
    loss_scale: float | None = None
    routers: dict[str, float] = dataclasses.field(default_factory=dict)

    def as_dict(self) -> dict[str, float]:
        """All numbers by name; those that there are, as JSON has none that is not."""
        numbers = dataclasses.asdict(self)
        numbers |= numbers.pop("routers")
        return {
            name: number
            for name, number in numbers.items()
            if number is not None and math.isfinite(number)
        }


@contextlib.contextmanager
def metrics_lines(path: Path | None, start: int = 0) -> Iterator[TextIO]:
    """Opens a file for metrics, or stdout if there is no path.

    Of several processes the first has the file: the numbers of all are the same.

    Args:
      path: A new file, or one of the same run: its steps after `start`, which come
        again, are taken out, and what a process that was killed had half written.
      start: Steps done before.
    """
    if jax.process_index() > 0:  # they would be the same
        yield io.StringIO()
        return
    if path is None:
        yield sys.stdout
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        part = path.with_name(f"{path.name}.part")
        part.write_text("".join(line for line in lines if _step_of(line) <= start))
        part.replace(path)
    with path.open("a", encoding="utf-8") as file:
        yield file


def _step_of(line: str) -> float:
    """The step of a line; a cut-off one, which is the last, is later than any."""
    return json.loads(line)["step"] if line.endswith("\n") else math.inf


def write_metrics(file: TextIO, metrics: StepMetrics) -> None:
    """Writes one line at once, so that a run can be watched and loses none."""
    print(json.dumps(metrics.as_dict()), file=file, flush=True)


def read_losses(path: Path) -> dict[int, float]:
    """The loss of each step in a metrics file.

    Raises:
      ValueError: If a line is no metrics of a step.
    """
    losses = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            metrics = json.loads(line)
            losses[int(metrics["step"])] = float(metrics["loss"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"'{path}', line {number}, is no JSON object with a step and a loss: "
                f"{error!r}. Give files written by `fsdp-jax train --metrics`."
            ) from error
    return losses


def peak_memory_bytes() -> int:
    """The most memory used so far: of the fullest GPU, or else of the process."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    peaks = [s["peak_bytes_in_use"] for s in stats if s and "peak_bytes_in_use" in s]
    if peaks:
        return max(peaks)
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
