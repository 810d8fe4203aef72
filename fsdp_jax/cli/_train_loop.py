"""The training loop of `fsdp-jax train`."""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path
from typing import Any

import grain
import jax
import optax
import orbax.checkpoint.checkpoint_managers as policies

import fsdp_jax as fsdp
from fsdp_jax.cli._callback import Callback, call
from fsdp_jax.cli._context_parallel import num_targets, split_rows
from fsdp_jax.cli._data import position
from fsdp_jax.cli._decoder import Batch, training_loss
from fsdp_jax.cli._errors import CheckFailed
from fsdp_jax.cli._log import say
from fsdp_jax.cli._metrics import (
    StepMetrics,
    metrics_lines,
    peak_memory_bytes,
    write_metrics,
)
from fsdp_jax.cli._profile import Window, tracer
from fsdp_jax.cli._progress import step_bar
from fsdp_jax.cli._routing import Routing, move_biases


@dataclasses.dataclass(frozen=True)
class Run:
    """From which step to which, and what to write on the way.

    Attributes:
      start: Steps done before.
      steps: The last step.
      save: Directory of the checkpoints.
      save_every: Saves at multiples of it; 0 for the last step alone.
      keep: Keeps the newest so many; 0 for all.
      metrics: File of the metrics; None for stdout.
      microbatches: Microbatches a step.
      metadata: Saved with each step, beside the position in the data.
      files: What each step carries along.
      callback: Called with the metrics of each step; None for nobody.
      window: Steps to trace; None for none.
      fused_loss: Whether logits are made a chunk of the vocabulary at a time.
      routing: How tokens find experts.
      loss_scale: That of the state; None for none.
    """

    start: int
    steps: int
    save: Path
    save_every: int
    keep: int
    metrics: Path | None
    microbatches: int
    metadata: dict[str, Any]
    files: dict[str, list[Path]]
    callback: Callback | None = None
    window: Window | None = None
    fused_loss: bool = False
    routing: Routing = Routing()
    loss_scale: fsdp.training.LossScale | None = None

    def open_checkpointer(self) -> fsdp.Checkpointer:
        """Opens the directory of the checkpoints, to be written in the background."""
        last = policies.SpecificStepsPolicy([self.steps])
        due = [policies.FixedIntervalPolicy(self.save_every)] if self.save_every else []
        return fsdp.Checkpointer(
            self.save,
            save_decision_policy=policies.AnySavePolicy([*due, last]),
            preservation_policy=policies.LatestN(self.keep) if self.keep else None,
        )


def run_steps(
    run: Run,
    plan: fsdp.Plan,
    tx: optax.GradientTransformation,
    state: fsdp.TrainState,
    batches: grain.DatasetIterator,
) -> None:
    """Trains.

    Args:
      run: What to do.
      plan: From `plan_decoder`.
      tx: The optimizer that made the state.
      state: After `run.start` steps; given up.
      batches: This host's rows of each, standing where the state stands.

    Raises:
      CheckFailed: If the loss is no longer finite; such a state is not saved.
      RuntimeError: If the callback raises.
      NotSavedError: If the last save failed.
      SystemExit: After SIGTERM, with status 143, when the step it came in is saved.
    """
    rate = run.routing.expert_bias_rate
    step = fsdp.make_train_step(
        plan,
        training_loss(fused=run.fused_loss, routing=run.routing),
        tx,
        has_aux=True,
        num_microbatches=run.microbatches,
        update_model_state=move_biases(rate) if rate else None,
        loss_scale=run.loss_scale,
    )
    # In this order: the bar may replace stdout, to have lines printed above itself.
    with (
        run.open_checkpointer() as checkpointer,
        step_bar(run.start, run.steps) as show,
        metrics_lines(run.metrics, run.start) as lines,
        tracer(run.window) as trace,
    ):
        for number in range(run.start + 1, run.steps + 1):
            trace.before(number, state)
            began = time.perf_counter()
            fsdp.launch.report_progress("reading the next batch", number)
            with jax.profiler.StepTraceAnnotation("train", step_num=number):
                batch = _next_batch(plan, batches)
                state, measured = step(state, batch)
                metrics = _metrics(number, measured, batch, began)
            trace.after(number, state)
            write_metrics(lines, metrics)
            call(run.callback, metrics)
            show(metrics)
            metadata = {**run.metadata, "data": position(batches)}
            try:
                checkpointer.save(number, state, metadata=metadata, files=run.files)
            except SystemExit:
                say(f"stopped: step {number} is in {run.save}")
                raise
    if (window := run.window) is not None:
        steps = f"steps {window.first} to {window.last}"
        say(f"the trace of {steps} is now in {window.dir}")
    say(f"step {run.steps} is now in {run.save}")


def _next_batch(plan: fsdp.Plan, batches: grain.DatasetIterator) -> Batch:
    rows = next(batches)
    count = fsdp.host_shard(plan.mesh).count
    given = split_rows(rows, plan.mesh.shape["cp"])
    return fsdp.global_batch(plan.mesh, given, count * len(rows))


def _metrics(
    number: int, measured: dict[str, Any], batch: Batch, began: float
) -> StepMetrics:
    loss, grad_norm = float(measured["loss"]), float(measured["grad_norm"])
    scale = float(measured["loss_scale"]) if "loss_scale" in measured else None
    passed_over = scale is not None and scale > 1
    if not (math.isfinite(loss) and (math.isfinite(grad_norm) or passed_over)):
        raise CheckFailed(
            f"Training diverged: step {number} has loss {loss} and grad_norm "
            f"{grad_norm}. Start again from an earlier step with a smaller --lr."
        )
    secs = time.perf_counter() - began
    return StepMetrics(
        step=number,
        loss=loss,
        grad_norm=grad_norm,
        tokens_per_sec=num_targets(batch) / secs,
        step_secs=secs,
        peak_memory_bytes=peak_memory_bytes(),
        loss_scale=scale,
        routers={name: value.item() for name, value in measured["aux"].items()},
    )
