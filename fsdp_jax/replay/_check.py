"""Does steps again on other devices, and compares what they make of the same state."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import SingleDeviceSharding

from fsdp_jax._tree import PyTree
from fsdp_jax.checkpoint._leaf_names import is_key
from fsdp_jax.replay._bound import leaves_beyond, scalars_beyond
from fsdp_jax.replay._digest import (
    DeviceDigests,
    device_digests,
    state_digest,
    watched_digests,
)
from fsdp_jax.replay._events import Events
from fsdp_jax.replay._recorded_step import RecordedStep
from fsdp_jax.replay._suspects import (
    CorruptionReport,
    Recorded,
    Wrong,
    suspect_devices,
)
from fsdp_jax.resharding import reshard
from fsdp_jax.sharding._offload import HOST
from fsdp_jax.sharding._plan import Plan
from fsdp_jax.training._state import TrainState
from fsdp_jax.training._train_step import TrainStep


class CorruptionError(RuntimeError):
    """A step, or the state between two steps, is not what it should be.

    Attributes:
      report: What was found.
    """

    def __init__(self, report: CorruptionReport):
        super().__init__(
            f"Silent corruption {report}. Go on from the last checkpoint before it, "
            "without these devices."
        )
        self.report = report


@dataclasses.dataclass(frozen=True)
class ReplayStep:
    """A step that replays: the same model, loss and optimizer on other devices.

    Attributes:
      step: Step made by `make_train_step` for another plan, such as one for the same
        mesh with its ranks exchanged, or for a mesh of another shape.
      tx: Optimizer that it was made with.
    """

    step: TrainStep
    tx: optax.GradientTransformation

    @property
    def plan(self) -> Plan:
        """Plan of the step."""
        return self.step.plan

    def recorded(
        self, state: TrainState, batch: PyTree
    ) -> tuple[TrainState, PyTree, Events]:
        """Runs the step, compiled once more, and returns its events too.

        Args:
          state: State, which is donated.
          batch: Batch.

        Returns:
          The same state and metrics as those of the step, and the events.
        """
        return self._recorded(state, batch)

    @functools.cached_property
    def _recorded(self) -> RecordedStep:
        return RecordedStep(self.step)


@dataclasses.dataclass(frozen=True)
class _Run:
    """A run of a checked step: what it made, and what is known of how."""

    step: ReplayStep
    state: TrainState
    metrics: PyTree
    recorded: Recorded


class ReplayCheck:
    """Train step that replays some of its steps and checks the state between all.

    Before each step, the shards' digests must equal those after the previous step.
    Every `every` steps, the step is also replayed from a host copy on the first replay
    plan. Parameters, optimizer state, model state, loss and gradient norm must be
    equal; gradients are compared by what they make of moments and parameters. If they
    differ, the second replay decides: the one of three that differs is wrong.

    Checked steps and replays also record digests of what each device reads, sends and
    receives, in the order of the program. The first of them that differs names the
    device, before the next collective spreads the fault.

    During a replay its devices store its state beside the new one. In a job of several
    processes all of them call the step, and all raise the same error.

    Args:
      checked: Step to check, with its optimizer.
      replays: Two replay steps; the second is compiled and run only if the first
        differs.
      every: Interval of steps to replay, by `state.step`; 0 for none.
      rtol: None to compare bits, where ranks are exchanged on a mesh of the same shape;
        else the largest difference of an element, relative to the largest magnitude in
        its leaf, where the mesh sums in another order.

    Raises:
      ValueError: If `every` is negative, there are not two replays, or `rtol` is
        negative or not finite.

    Examples:
      >>> def replay_step(shift):
      ...     devices = jax.devices()[shift:] + jax.devices()[:shift]
      ...     mesh = fsdp.make_mesh(devices=devices)
      ...     plan = fsdp.fully_shard(make_model, mesh, [fsdp.Stacked("layers")])
      ...     step = fsdp.make_train_step(plan, loss_fn, tx)
      ...     return fsdp.replay.ReplayStep(step, tx)
      >>> checked, *replays = (replay_step(shift) for shift in range(3))
      >>> step = fsdp.replay.ReplayCheck(checked, replays, every=100)
      >>> state = fsdp.init_state(plan, tx, params)
      >>> state, metrics = step(state, batch)
    """

    def __init__(
        self,
        checked: ReplayStep,
        replays: Sequence[ReplayStep],
        *,
        every: int = 100,
        rtol: float | None = None,
    ):
        if every < 0 or len(replays) != 2:
            raise ValueError(
                f"ReplayCheck({len(replays)} replays, {every=}): pass 2 replays, the "
                "second to decide if the first differs, and an interval of at least 1, "
                "or 0 to check the state between steps alone."
            )
        if rtol is not None and not 0 <= rtol < math.inf:
            raise ValueError(
                f"ReplayCheck({rtol=}): pass a finite number, at least 0, or None."
            )
        self._checked, self._replays = checked, tuple(replays)
        self._every, self._rtol = every, rtol
        self._last: DeviceDigests | None = None

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, PyTree]:
        """Runs a step as `TrainStep` does; the old state is donated.

        Raises:
          CorruptionError: If the state changed since the last step, or the replay of
            this one differs.
        """
        number = int(state.step) + 1
        self._check_unchanged(state, number)
        if not (self._every and number % self._every == 0):
            new, metrics = self._checked.step(state, batch)
            self._last = watched_digests(new)
            return new, metrics
        kept = _on_host(state)
        run = _run(self._checked, state, batch)
        self._last = run.recorded.made.watched
        self._check_replayed(kept, batch, run, number)
        return run.state, run.metrics

    def reset(self) -> None:
        """Forgets the last step, for a state that comes from elsewhere."""
        self._last = None

    def _check_unchanged(self, state: TrainState, number: int) -> None:
        if self._last is None:
            return
        changed = self._last.changes(watched_digests(state))
        if changed:
            leaves = tuple(sorted({n for names in changed.values() for n in names}))
            raise CorruptionError(
                CorruptionReport(number, leaves, "state", tuple(changed))
            )

    def _check_replayed(
        self, kept: TrainState, batch: PyTree, checked: _Run, number: int
    ) -> None:
        first, second = self._replays
        runs = [checked, _replayed(first, kept, batch)]
        leaves = self._differences(*runs)
        if not leaves:
            return
        runs.append(_replayed(second, kept, batch))
        wrong: Wrong = "undecided"
        if not self._differences(runs[1], runs[2]):
            wrong = "step"
        elif not self._differences(runs[0], runs[2]):
            wrong = "replay"
        devices = suspect_devices(
            [run.recorded for run in runs], is_exact=self._rtol is None
        )
        raise CorruptionError(CorruptionReport(number, leaves, wrong, devices))

    def _differences(self, a: _Run, b: _Run) -> tuple[str, ...]:
        """Returns the names of leaves and metrics that differ between two results."""
        if self._rtol is None:
            leaves = state_digest(a.state).differences(state_digest(b.state))
        else:
            there = reshard(b.state, a.step.plan, a.step.tx)
            leaves = leaves_beyond(a.state, there, self._rtol)
        return (*leaves, *scalars_beyond(a.metrics, b.metrics, self._rtol))


def _run(step: ReplayStep, state: TrainState, batch: PyTree) -> _Run:
    given = device_digests(state)
    new, metrics, events = step.recorded(state, batch)
    sums = np.array([metrics["loss"], metrics["grad_norm"]], np.float32)
    made = device_digests(new)
    recorded = Recorded(step.plan.mesh, given, events, sums.view(np.uint32), made)
    return _Run(step, new, metrics, recorded)


def _replayed(step: ReplayStep, kept: TrainState, batch: PyTree) -> _Run:
    return _run(step, reshard(kept, step.plan, step.tx), batch)


def _on_host(state: TrainState) -> TrainState:
    """Copies every shard to host memory; the state keeps its own."""
    return jax.block_until_ready(jax.tree.map(_array_on_host, state))


def _array_on_host(array: jax.Array) -> jax.Array:
    if is_key(array):
        return jnp.copy(array)  # A few bytes, in an array of arrays.
    # Shard by shard: `jax.device_put` takes no array that other processes share. What
    # is in host memory already would be the same array, which the step donates.
    shards = [
        jax.device_put(
            shard.data,
            SingleDeviceSharding(shard.device, memory_kind=HOST),
            may_alias=False,
        )
        for shard in array.addressable_shards
    ]
    sharding = array.sharding.with_memory_kind(HOST)
    return jax.make_array_from_single_device_arrays(array.shape, sharding, shards)
