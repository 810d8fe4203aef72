"""Metrics of training steps: one JSON object a line."""

from __future__ import annotations

import contextlib
import dataclasses
import json
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
      grad_norm: Of the whole gradient.
      tokens_per_sec: Of all devices; the first step's counts compilation too.
      step_secs: Seconds from batch to metrics.
      peak_memory_bytes: The largest so far: of the fullest GPU, or of the process
        where devices are simulated.
    """

    step: int
    loss: float
    grad_norm: float
    tokens_per_sec: float
    step_secs: float
    peak_memory_bytes: int


@contextlib.contextmanager
def metrics_lines(path: Path | None) -> Iterator[TextIO]:
    """Opens a new file for metrics, or stdout if there is no path."""
    if path is None:
        yield sys.stdout
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("x", encoding="utf-8") as file:
        yield file


def write_metrics(file: TextIO, metrics: StepMetrics) -> None:
    """Writes one line at once, so that a run can be watched and loses none."""
    print(json.dumps(dataclasses.asdict(metrics)), file=file, flush=True)


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
