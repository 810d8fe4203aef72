"""The options of replayed steps, and the step that replays."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import optax
from jax.sharding import Mesh

import fsdp_jax as fsdp
from fsdp_jax.cli._errors import CheckFailed
from fsdp_jax.cli._options import Unset


@dataclasses.dataclass(frozen=True)
class ReplayOptions:
    """Checks against silent corruption.

    Attributes:
      check_replay: Interval of steps that are done again on other devices, with the
        ranks exchanged; between all steps the state is watched too.
      replay_rtol: Largest difference of an element, relative to the largest magnitude
        in its leaf, where collectives sum in an order of devices; default 0, for the
        same bits.
      chain: Record in each checkpoint the digests of state, data, code, plan and
        options, and of the checkpoint before, for fsdp-jax audit.
    """

    check_replay: Unset[int] = None
    replay_rtol: Unset[float] = None
    chain: bool = False

    def check(self) -> None:
        """Raises a `ValueError` for numbers out of range, or without effect."""
        every, rtol = self.check_replay, self.replay_rtol
        if every is not None and every < 1:
            raise ValueError(f"--check-replay {every} must be at least 1.")
        if rtol is not None and not (every and 0 <= rtol < math.inf):
            raise ValueError(
                f"--replay-rtol {rtol}: a finite number, at least 0, with "
                "--check-replay N."
            )

    def check_devices(self, mesh: Mesh) -> None:
        """Raises a `ValueError` if there are no other devices to replay on.

        Args:
          mesh: Device mesh.
        """
        if self.check_replay is None:
            return
        if mesh.size < 3:
            raise ValueError(
                f"--check-replay {self.check_replay} on {mesh.size} device(s): three "
                "results need 3 devices, over which ranks are exchanged."
            )


def exchanged(mesh: Mesh, by: int) -> Mesh:
    """Returns the mesh with each rank on another device.

    Args:
      mesh: Mesh from `make_mesh`.
      by: Number of places by which the ranks move on.
    """
    devices = np.roll(mesh.devices.reshape(-1), by).reshape(mesh.devices.shape)
    return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


def replayed(
    options: ReplayOptions,
    plan: fsdp.Plan,
    make_plan: Callable[[Mesh], fsdp.Plan],
    make_step: Callable[[fsdp.Plan], fsdp.training.TrainStep],
    tx: optax.GradientTransformation,
) -> Callable[..., Any]:
    """Returns the step of a plan, replayed as the options say.

    Args:
      options: Options with `check_replay`.
      plan: Plan of the run.
      make_plan: Makes the plan for another mesh.
      make_step: Makes the step of a plan.
      tx: Optimizer.
    """
    plans = [plan, *(make_plan(exchanged(plan.mesh, by)) for by in (1, 2))]
    checked, *others = (fsdp.replay.ReplayStep(make_step(each), tx) for each in plans)
    check = fsdp.replay.ReplayCheck(
        checked, others, every=options.check_replay or 0, rtol=options.replay_rtol
    )

    def step(state, batch):
        try:
            return check(state, batch)
        except fsdp.replay.CorruptionError as error:
            raise CheckFailed(str(error)) from error

    return step
