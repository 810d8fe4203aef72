"""A run of `fsdp-jax train`: what its loop is given."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

import fsdp_jax as fsdp
from fsdp_jax.cli._callback import Callback
from fsdp_jax.cli._chain import Link
from fsdp_jax.cli._data_config import DataConfig
from fsdp_jax.cli._held_out import HeldOut
from fsdp_jax.cli._metrics import StepMetrics
from fsdp_jax.cli._orbax_log import be_brief_about_saves
from fsdp_jax.cli._profile import Window
from fsdp_jax.cli._replay import ReplayOptions
from fsdp_jax.cli._routing import Routing
from fsdp_jax.cli._run_marker import Command
from fsdp_jax.cli._run_options import LogOptions, SaveOptions
from fsdp_jax.cli._samples import Samples


@dataclasses.dataclass(frozen=True)
class Run:
    """A run: its steps, its checkpoints and its outputs.

    Attributes:
      start: Number of steps done before.
      steps: Last step.
      save: Directory of the checkpoints.
      checkpoints: Steps to save and to keep.
      logs: Destination of the metrics.
      options: Options of the run, by section.
      metadata: Metadata of each saved step, beside the position in the data.
      files: Files saved with each step.
      data: Options of the data.
      loss_fn: Loss from `training_loss`, or from `document_loss`.
      per_token: Whether it is from `document_loss`.
      microbatches: Microbatches a step.
      batch_parts: Parts of a rank's rows that layers run side by side.
      held_out: Held-out data to evaluate; None for none.
      samples: Prompts to continue; None for none.
      callback: Function called with the metrics of each step; None for none.
      window: Steps to trace; None for none.
      routing: Routing of models with experts.
      loss_scale: Loss scale of the state; None for none.
      name_rows: Names the data of rows of the stream, for errors.
      replay: Checks against silent corruption.
      make_plan: Makes the plan for another mesh, to replay on; None for no replays.
      before: Link of the step that the run goes on from; None for none.
      goes_on: Whether the run in `save` is this one, begun by an earlier start.
      command: Command, which is recorded in `save` as one that began the run, or went
        on with it; None for none.
    """

    start: int
    steps: int
    save: Path
    checkpoints: SaveOptions
    logs: LogOptions
    options: dict[str, Any]
    metadata: dict[str, Any]
    files: dict[str, list[Path]]
    data: DataConfig
    loss_fn: Callable[..., Any]
    per_token: bool = False
    microbatches: int = 1
    batch_parts: int = 1
    held_out: HeldOut | None = None
    samples: Samples | None = None
    callback: Callback | None = None
    window: Window | None = None
    routing: Routing = Routing()
    loss_scale: fsdp.training.LossScale | None = None
    name_rows: Callable[[Sequence[int]], str] = str
    replay: ReplayOptions = ReplayOptions()
    make_plan: Callable[[Mesh], fsdp.Plan] | None = None
    before: Link | None = None
    goes_on: bool = True
    command: Command | None = None

    def is_logged(self, metrics: StepMetrics) -> bool:
        """Returns whether the metrics of a step are written.

        Args:
          metrics: Metrics of the step.
        """
        is_due = metrics.step % (self.logs.log_every or 1) == 0
        return is_due or metrics.step == self.steps or metrics.eval_loss is not None

    def open_checkpointer(self) -> fsdp.Checkpointer:
        """Opens the directory of the checkpoints, which are saved in the background."""
        be_brief_about_saves()
        return fsdp.Checkpointer(
            self.save,
            save_decision_policy=self.checkpoints.decision(self.steps),
            preservation_policy=self.checkpoints.preservation(self.save),
            local=self.checkpoints.local,
        )
