"""Steps replayed over two processes: all of them find a fault, and name one device."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from distributed import training
from helpers.flips import flip_bit
from helpers.processes import run_processes

import fsdp_jax as fsdp
from fsdp_jax.replay import ReplayCheck, ReplayStep

pytestmark = [pytest.mark.distributed, pytest.mark.long]

# Sums of four float32 gradients in another order, divided by their root.
RTOL = 1e-3


@dataclasses.dataclass(frozen=True)
class Flipped(ReplayStep):
    """A step that reads another weight than it is given, on the device of a rank."""

    rank: int = 0

    def recorded(self, state, batch):
        device = self.plan.mesh.devices.flat[self.rank]
        state = flip_bit(state, leaf="params.layer1.w", device=device, bit=20)
        return super().recorded(state, batch)


def replay_step(by: int, **sizes: int) -> ReplayStep:
    mesh = fsdp.make_mesh(devices=list(np.roll(jax.devices(), by)), **sizes)
    plan = fsdp.fully_shard(training.make_model, mesh, units=["layer*"])
    step = fsdp.make_train_step(plan, training.loss_fn, training.TX)
    return ReplayStep(step, training.TX)


def scenario() -> dict[str, Any]:
    steps = [replay_step(by) for by in range(3)]
    wrong = [
        Flipped(step.step, step.tx, rank)
        for step, rank in zip(steps, (1, 3), strict=False)
    ]
    other = [replay_step(by, dp_outer=2) for by in range(2)]
    return {
        "ids": [device.id for device in jax.devices()],
        "without a fault": found(ReplayCheck(steps[0], steps[1:], every=1)),
        "in the step": found(ReplayCheck(wrong[0], steps[1:], every=1)),
        "in the replay": found(ReplayCheck(steps[0], [wrong[1], steps[2]], every=1)),
        "another mesh": found(ReplayCheck(steps[0], other, every=1, rtol=RTOL)),
        "beyond": found(ReplayCheck(wrong[0], other, every=1, rtol=RTOL)),
        "between": found(ReplayCheck(steps[0], steps[1:], every=0), flips=3),
    }


def found(check: ReplayCheck, flips: int | None = None) -> list[Any] | None:
    """What a check reports of two steps, with a bit flipped between them."""
    plan = replay_step(0).plan
    state, stream = training.start(plan), training.batches(plan)
    try:
        state, _ = check(state, next(stream))
        if flips is not None:
            device = jax.devices()[flips]
            state = flip_bit(state, leaf="params.layer0.b", device=device, bit=0)
        check(state, next(stream))
    except fsdp.replay.CorruptionError as error:
        return [error.report.wrong, [device.id for device in error.report.devices]]
    return None


def test_all_processes_find_a_fault_of_one_device_and_name_it():
    results = run_processes(scenario, 2, devices=2)
    ids = results[0]["ids"]
    expected = {
        "ids": ids,
        "without a fault": None,
        "in the step": ["step", [ids[1]]],
        # Rank 3 of the mesh whose first device is the last.
        "in the replay": ["replay", [ids[2]]],
        "another mesh": None,
        "beyond": ["step", [ids[1]]],
        "between": ["state", [ids[3]]],
    }
    assert results == [expected, expected]
