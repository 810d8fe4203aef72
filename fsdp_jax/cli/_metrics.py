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

from fsdp_jax._report import format_bytes
from fsdp_jax._streams import discard
from fsdp_jax.cli._log import say

EVAL_LOSS = "eval_loss"
"""Key of the held-out loss in the metadata of a step."""


@dataclasses.dataclass(frozen=True)
class StepMetrics:
    """Metrics of a step.

    Attributes:
      step: Number of updates so far, with this one.
      loss: Mean over the global batch, before the update.
      grad_norm: Norm of the gradient; not finite in a step that a loss scale skipped.
      tokens_per_sec: Tokens a second on all devices; in the first step with
        compilation.
      step_secs: Seconds from batch to metrics.
      peak_memory_bytes: Largest memory so far, of the fullest GPU, or of the process if
        devices are simulated.
      mfu: Model FLOPs utilization, of 1; None if the peak of the devices is unknown.
      eval_loss: Mean loss of the held-out data after the update; None if it was not
        measured after this step.
      loss_scale: Factor of the loss in this step; None if there is none.
      aux: Metrics of the loss: of a model with experts the cross entropy without
        balancing losses, and the metrics of `router_losses`; of preferences the rewards
        of both answers.
    """

    step: int
    loss: float
    grad_norm: float
    tokens_per_sec: float
    step_secs: float
    peak_memory_bytes: int
    mfu: float | None = None
    loss_scale: float | None = None
    aux: dict[str, float] = dataclasses.field(default_factory=dict)
    eval_loss: float | None = None

    def figures(self) -> dict[str, str]:
        """Returns the figures for people, by what they are."""
        found = {"loss": f"loss {self.loss:.4f}"}
        if self.eval_loss is not None:
            found["held_out"] = f"held-out loss {self.eval_loss:.4f}"
        found["grad_norm"] = f"grad norm {self.grad_norm:.3g}"
        found["speed"] = f"{self.tokens_per_sec:,.0f} tokens/s"
        if self.mfu is not None:
            found["mfu"] = f"MFU {self.mfu:.1%}"
        found["memory"] = format_bytes(self.peak_memory_bytes)
        return found

    def as_text(self) -> str:
        """Returns a line for people."""
        return "  ".join([f"step {self.step}", *self.figures().values()])

    def as_dict(self) -> dict[str, float]:
        """Returns the numbers by name, without those that JSON cannot express."""
        numbers = dataclasses.asdict(self)
        numbers |= numbers.pop("aux")
        return {
            name: number
            for name, number in numbers.items()
            if number is not None and math.isfinite(number)
        }


@contextlib.contextmanager
def metrics_lines(path: Path | None, start: int = 0) -> Iterator[TextIO]:
    """Opens a file for metrics, or stdout if there is no path; in process 0 alone.

    Args:
      path: New file, or the file of the same run: its lines after step `start`, which
        are made again, and an incomplete last line are removed.
      start: Number of steps done before.
    """
    if jax.process_index() > 0:  # The metrics of all processes are the same.
        yield io.StringIO()
        return
    if path is None:
        yield sys.stdout
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        part = path.with_name(f"{path.name}.part")
        kept = (
            line
            for number, line in enumerate(lines, 1)
            if _step_of(line, f"--metrics '{path}', line {number},") <= start
        )
        part.write_text("".join(kept), encoding="utf-8")
        part.replace(path)
    with path.open("a", encoding="utf-8") as file:
        yield file


def _step_of(line: str, subject: str) -> float:
    """Returns the step of a line; infinity for an incomplete one, which is the last."""
    if not line.endswith("\n"):
        return math.inf
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{subject} is not a JSON object with a step: {error!r}. Move the file "
            "away: the run goes on in a new one."
        ) from error


def write_metrics(file: TextIO, metrics: StepMetrics) -> None:
    """Writes one line, flushed: JSON, or on a terminal a line for people.

    A run whose reader has gone, as in `fsdp-jax train ... | head -1`, continues without
    writing.

    Args:
      file: File from `metrics_lines`.
      metrics: Metrics of a step.
    """
    text = metrics.as_text() if file.isatty() else json.dumps(metrics.as_dict())
    try:
        print(text, file=file, flush=True)
    except BrokenPipeError:
        discard(file)
        say(
            f"stdout was closed: training continues, and the metrics from step "
            f"{metrics.step} on are not written. Use --metrics FILE to keep them."
        )


def read_losses(path: Path) -> dict[int, float]:
    """Reads the loss of each step in a metrics file.

    Args:
      path: File written by `fsdp-jax train --metrics`.

    Raises:
      ValueError: If it is no file, or a line has no step and loss.
    """
    if not path.is_file():
        raise ValueError(
            f"'{path}' is no file: give one that `fsdp-jax train --metrics` wrote."
        )
    losses = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            metrics = json.loads(line)
            losses[int(metrics["step"])] = float(metrics["loss"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"'{path}', line {number}, is not a JSON object with a step and a "
                f"loss: {error!r}. Give files written by `fsdp-jax train --metrics`."
            ) from error
    return losses


def peak_memory_bytes() -> int:
    """Returns the peak memory of the fullest GPU, or else of the process, in bytes."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    peaks = [s["peak_bytes_in_use"] for s in stats if s and "peak_bytes_in_use" in s]
    if peaks:
        return max(peaks)
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
