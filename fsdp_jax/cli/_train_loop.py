"""The training loop of `fsdp-jax train`."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import optax

import fsdp_jax as fsdp
from fsdp_jax.cli._callback import call
from fsdp_jax.cli._chain import KEY, Chain, link_in
from fsdp_jax.cli._context_parallel import num_rows, num_targets, split_rows
from fsdp_jax.cli._data import Batches, position
from fsdp_jax.cli._decoder_loss import Batch
from fsdp_jax.cli._errors import CheckFailed
from fsdp_jax.cli._log import say
from fsdp_jax.cli._log_writers import logged_run, open_writers
from fsdp_jax.cli._metrics import (
    EVAL_LOSS,
    StepMetrics,
    metrics_lines,
    peak_memory_bytes,
    write_metrics,
)
from fsdp_jax.cli._profile import tracer
from fsdp_jax.cli._replay import replayed
from fsdp_jax.cli._routing import move_biases
from fsdp_jax.cli._run import Run
from fsdp_jax.cli._run_file import write_run_file
from fsdp_jax.cli._run_marker import mark_begun
from fsdp_jax.cli._screen import step_screen
from fsdp_jax.cli._training_data import move_to
from fsdp_jax.cli._utilization import Utilization, utilization_of
from fsdp_jax.training._compiler_options import options_for


def run_steps(
    run: Run,
    plan: fsdp.Plan,
    tx: optax.GradientTransformation,
    make_state: Callable[[], fsdp.TrainState],
    batches: Batches,
) -> None:
    """Runs the steps of `run`, saving and evaluating as due.

    Args:
      run: Steps, checkpoints and outputs.
      plan: Plan from `plan_decoder`.
      tx: Optimizer.
      make_state: Makes or loads the state after `run.start` steps, unless a newer one
        is on the local disks.
      batches: Batches of this host, at the position of the state.

    Raises:
      CheckFailed: If the loss is no longer finite; such a state is not saved.
      RuntimeError: If the callback raises.
      NotSavedError: If the last save failed.
      SystemExit: After SIGTERM, with status 143, when the current step is saved.
      KeyboardInterrupt: As it came, once it is said which step is saved.
    """
    try:
        _run_all(run, plan, tx, make_state, batches)
    except KeyboardInterrupt:
        step = fsdp.latest_step(run.save)
        saved = f"step {step} is in {run.save}: the same command goes on from it"
        say(f"interrupted: {'no step is saved' if step is None else saved}")
        raise


def _run_all(
    run: Run,
    plan: fsdp.Plan,
    tx: optax.GradientTransformation,
    make_state: Callable[[], fsdp.TrainState],
    batches: Batches,
) -> None:
    with run.open_checkpointer() as checkpointer:
        before = None, None
        if run.before is not None:
            before = run.before.digest, run.before.step
        state = _resume_locally(run, checkpointer, plan, tx, batches)
        if state is not None and (link := link_in(checkpointer.metadata)) is not None:
            # The chain is of the steps in `save`: the one before this local step.
            before = link.before, link.before_step
        if run.command is not None:  # Now that nothing is in its way.
            mark_begun(run.save, run.command)
            write_run_file(run.save, run.options)
        state = make_state() if state is None else state
        run = dataclasses.replace(run, start=int(state.step))
        saved = _StepSaver(run, checkpointer, _chain(run, plan, before))
        _run_steps(run, plan, _make_step(run, plan, tx), state, batches, saved)
    if (window := run.window) is not None:
        steps = f"steps {window.first} to {window.last}"
        say(f"the trace of {steps} is now in {window.dir}")
    say(f"step {run.steps} is now in {run.save}")


def _resume_locally(
    run: Run,
    checkpointer: fsdp.Checkpointer,
    plan: fsdp.Plan,
    tx: optax.GradientTransformation,
    batches: Batches,
) -> fsdp.TrainState | None:
    """Loads the newest step on the local disks, and moves the batches to its position.

    Returns:
      The state, or None if there is none that is newer than `run.start`.
    """
    if run.checkpoints.local is None:
        return None
    # Also before the first save, which deletes local steps that nobody asked for.
    state = checkpointer.resume(fsdp.abstract_state(plan, tx, run.loss_scale))
    if state is None or int(state.step) <= run.start:
        return None
    if not run.goes_on:
        raise ValueError(
            f"--local-checkpoints '{run.checkpoints.local.path}' holds step "
            f"{int(state.step)} of a run that another command began in '{run.save}', "
            "and that saved no step there. Begin yours in another directory, or remove "
            f"'{run.save}' first."
        )
    say(f"resuming from step {int(state.step)} on the local disks")
    assert checkpointer.metadata is not None
    move_to(batches, checkpointer.metadata, run.data)
    return state


def _make_step(
    run: Run, plan: fsdp.Plan, tx: optax.GradientTransformation
) -> Callable[..., Any]:
    rate = run.routing.expert_bias_rate

    def make(plan: fsdp.Plan) -> fsdp.training.TrainStep:
        return fsdp.make_train_step(
            plan,
            run.loss_fn,
            tx,
            has_aux=True,
            num_microbatches=run.microbatches,
            calculate_per_token_loss=run.per_token,
            update_model_state=move_biases(rate) if rate else None,
            loss_scale=run.loss_scale,
            compiler_options=options_for(plan, None, run.batch_parts),
        )

    if run.replay.check_replay is None or run.make_plan is None:
        return make(plan)
    return replayed(run.replay, plan, run.make_plan, make, tx)


def _chain(
    run: Run, plan: fsdp.Plan, before: tuple[str | None, int | None]
) -> Chain | None:
    if not run.replay.chain:
        return None
    return Chain(plan, run.options, run.metadata["data_sha256"], *before)


@dataclasses.dataclass(frozen=True)
class _StepSaver:
    """Saves the steps of a run that are due, each with its metadata.

    Attributes:
      run: The run.
      checkpointer: Checkpointer of its directory.
      chain: Links of the steps; None for none.
    """

    run: Run
    checkpointer: fsdp.Checkpointer
    chain: Chain | None

    def __call__(
        self,
        number: int,
        state: fsdp.TrainState,
        batches: Batches,
        eval_loss: float | None,
    ) -> None:
        """Saves a step if it is due.

        Raises:
          SystemExit: After SIGTERM, once the step is saved.
        """

        def metadata() -> dict[str, Any]:
            found = {**self.run.metadata, "data": position(batches)}
            if eval_loss is not None:
                found[EVAL_LOSS] = eval_loss
            if self.chain is not None:
                found[KEY] = self.chain.link(number, state, found["data"])
            return found

        files = self.run.files
        try:
            self.checkpointer.save(number, state, metadata=metadata, files=files)
        except SystemExit:
            say(f"stopped: step {number} is in {self.run.save}")
            raise
        every = self.run.checkpoints.save_every
        # Steps on the local disks alone are in no chain: they are deleted again.
        if self.chain and (number == self.run.steps or (every and not number % every)):
            self.chain.advance()


def _run_steps(
    run: Run,
    plan: fsdp.Plan,
    step: Callable[..., Any],
    state: fsdp.TrainState,
    batches: Batches,
    save: _StepSaver,
) -> None:
    measure = _Measure(run, plan)
    evaluate = None if run.held_out is None else run.held_out.make(plan)
    write_samples = None if run.samples is None else run.samples.make(plan)
    logged = logged_run(run.save, run.start, run.options)
    # In this order: the screen may replace stdout, to print lines above itself.
    with (
        step_screen(run.start, run.steps) as screen,
        metrics_lines(run.logs.metrics, run.start) as lines,
        tracer(run.window) as trace,
        open_writers(run.logs.log_to, logged) as log,
    ):
        for number in range(run.start + 1, run.steps + 1):
            trace.before(number, state)
            began = time.perf_counter()
            fsdp.launch.report_progress("reading the next batch", number)
            with jax.profiler.StepTraceAnnotation("train", step_num=number):
                batch = _next_batch(plan, batches)
                state, measured = step(state, batch)
                metrics = measure(number, measured, batch, batches, began)
            trace.after(number, state)
            if evaluate and run.held_out and run.held_out.is_due(number, run.steps):
                metrics = dataclasses.replace(metrics, eval_loss=evaluate(state))
            if run.is_logged(metrics):
                if not (screen.has_figures and lines.isatty()):
                    write_metrics(lines, metrics)
                log(metrics)
            call(run.callback, metrics)
            screen.show(metrics)
            if write_samples and run.samples and run.samples.is_due(number, run.steps):
                for text in write_samples(state):
                    say(f"sample after step {number}: {json.dumps(text)}")
            save(number, state, batches, metrics.eval_loss)


def _next_batch(plan: fsdp.Plan, batches: Batches) -> Batch:
    rows = next(batches)
    count = fsdp.host_shard(plan.mesh).count
    given = split_rows(rows, plan.mesh.shape["cp"])
    return fsdp.global_batch(plan.mesh, given, count * num_rows(rows))


class _Measure:
    """Makes the metrics of steps.

    Args:
      run: The run.
      plan: Plan of the model.
    """

    def __init__(self, run: Run, plan: fsdp.Plan):
        self._run, self._plan = run, plan
        self._utilization: Utilization | None = None

    def __call__(
        self,
        number: int,
        measured: dict[str, Any],
        batch: Batch,
        batches: Batches,
        began: float,
    ) -> StepMetrics:
        """Waits for a step, and returns its metrics.

        Raises:
          CheckFailed: If the loss is not finite, or a gradient that no loss scale
            explains; it names the rows of the batch.
        """
        loss, grad_norm = float(measured["loss"]), float(measured["grad_norm"])
        scale = float(measured["loss_scale"]) if "loss_scale" in measured else None
        skipped = scale is not None and scale > 1
        if not (math.isfinite(loss) and (math.isfinite(grad_norm) or skipped)):
            raise CheckFailed(
                f"Training diverged: step {number} has loss {loss} and grad_norm "
                f"{grad_norm}. Its batch is "
                f"{self._run.name_rows(batches.last_rows())}. Start again from an "
                "earlier step with a smaller --lr, or without the rows that cause it."
            )
        secs = time.perf_counter() - began
        return StepMetrics(
            step=number,
            loss=loss,
            grad_norm=grad_norm,
            tokens_per_sec=num_targets(batch) / secs,
            step_secs=secs,
            peak_memory_bytes=peak_memory_bytes(),
            mfu=self._mfu(batch, secs),
            loss_scale=scale,
            aux={name: value.item() for name, value in measured["aux"].items()},
        )

    def _mfu(self, batch: Batch, secs: float) -> float | None:
        if self._utilization is None:
            run = self._run
            self._utilization = utilization_of(
                self._plan,
                run.loss_fn,
                batch,
                run.logs.peak_tflops,
                per_token=run.per_token,
            )
        return None if self._utilization is None else self._utilization.of(secs)
