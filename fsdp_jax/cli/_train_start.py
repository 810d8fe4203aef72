"""Start of a training run: its model, the step it goes on from, options and state."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import optax

import fsdp_jax as fsdp
from fsdp_jax.cli._adam import settings_of_import
from fsdp_jax.cli._model_source import (
    Checkpoint,
    Origin,
    RandomModel,
    open_any,
    open_random,
    open_run,
)
from fsdp_jax.cli._own_tokenizer import default_tokenizer
from fsdp_jax.cli._routing import default_aux_loss_coef
from fsdp_jax.cli._run_marker import newest_good_step
from fsdp_jax.cli._train_config import TrainConfig, config_of, merge_options
from fsdp_jax.cli._train_options import StartOptions


def open_start(
    start: StartOptions, save: Path, *, begun: bool
) -> tuple[Origin, Checkpoint | None]:
    """Opens the model of a run.

    Args:
      start: Origin of the weights.
      save: Directory of the checkpoints.
      begun: Whether an earlier start of the same command began the run.

    Returns:
      The model, and the step to resume from; None if the run is new.
    """
    if begun and (newest := newest_good_step(save)) is not None:
        resumed = open_run(save, newest)
        return resumed, resumed
    if start.resume is not None:
        resumed = open_run(start.resume, start.resume_step)
        return resumed, resumed
    if start.config is not None:
        return open_random(start.config, start.ignore_field), None
    assert start.hf is not None
    return open_any(start.hf, ignore_fields=start.ignore_field), None


def check_steps(steps: int, start: int, save: Path) -> None:
    """Checks that a run has steps left, and its directory no later ones.

    Args:
      steps: Last step.
      start: Number of steps done before.
      save: Directory of the checkpoints.

    Raises:
      ValueError: If the last step is done, or the directory has a later one.
    """
    if steps <= start:
        raise ValueError(
            f"--steps {steps} is the step to train to, and the run starts from "
            f"step {start}. Use more than {start}."
        )
    newest = fsdp.latest_step(save)
    if newest is not None and newest > start:
        raise ValueError(
            f"--save '{save}' holds step {newest} already, and this run starts "
            f"from step {start}: two runs would mix. Save to another directory."
        )


def check_ranges(typed: Mapping[str, Any], steps: int) -> None:
    """Checks the ranges of the options of a new run, before its model is opened.

    Args:
      typed: Options that were given, by name.
      steps: Last step.

    Raises:
      ValueError: If a number is out of its range.
    """
    config_of(
        {"tokenizer": "bytes", "lr_steps": None, **_length(typed, steps), **typed}
    )


def options_at_start(
    typed: Mapping[str, Any], origin: Origin, stored: Mapping[str, Any], steps: int
) -> TrainConfig:
    """Returns the options of a run: those given, those stored, and defaults.

    Args:
      typed: Options that were given, by name.
      origin: Model, whose config and files have defaults.
      stored: Metadata of the step that is resumed; empty for a new run.
      steps: Last step.

    Raises:
      ValueError: As `merge_options`.
    """
    defaults = {
        "aux_loss_coef": default_aux_loss_coef(origin.config),
        **_length(typed, steps),
    }
    if "tokenizer" not in typed and "train" not in stored:
        defaults["tokenizer"] = default_tokenizer(origin)
    if "optimizer" in stored and "train" not in stored:
        defaults |= settings_of_import(stored, typed)
    return merge_options(typed, stored.get("train", {}), defaults)


def start_state(
    origin: Origin,
    resumed: Checkpoint | None,
    plan: fsdp.Plan,
    tx: optax.GradientTransformation,
    loss_scale: fsdp.training.LossScale | None,
    seed: int = 0,
) -> fsdp.TrainState:
    """Makes the state that training starts from, or loads it as it was saved.

    Args:
      origin: Model.
      resumed: Step to resume from; None for a new run.
      plan: Plan from `plan_decoder`.
      tx: Optimizer.
      loss_scale: Loss scale of the state; None for none.
      seed: Seed of random weights.
    """
    if resumed is None and isinstance(origin, RandomModel):
        params = fsdp.init_params(plan, jax.random.key(seed))
        return fsdp.init_state(plan, tx, params, loss_scale=loss_scale)
    if resumed is None:
        if plan.config.lora is None:
            params = origin.load_params(plan.params)
        else:
            base = origin.load_params(fsdp.training.abstract_base_params(plan))
            params = fsdp.training.add_lora(plan, base, jax.random.key(seed))
        return fsdp.init_state(plan, tx, params, loss_scale=loss_scale)
    like = fsdp.abstract_state(plan, tx, loss_scale)
    return fsdp.load(resumed.path, like, step=resumed.step)


def _length(typed: Mapping[str, Any], steps: int) -> dict[str, int]:
    """Returns the default length of a schedule; nothing for a constant rate."""
    is_constant = typed.get("lr_schedule", "constant") == "constant"
    return {} if is_constant else {"lr_steps": steps}
