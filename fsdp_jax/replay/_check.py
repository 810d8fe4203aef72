"""Does steps again on other devices, and compares what they make of the same state."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fsdp_jax._tree import PyTree
from fsdp_jax.checkpoint._leaf_names import flatten
from fsdp_jax.replay._digest import DeviceDigests, device_digests, state_digest
from fsdp_jax.replay._suspects import CorruptionReport, suspect_devices
from fsdp_jax.resharding import reshard
from fsdp_jax.sharding._plan import Plan
from fsdp_jax.training._state import TrainState

RANK_LOSSES = "rank_losses"
"""Name in `aux` under which `with_rank_losses` adds the loss of each data rank."""


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


class PlannedStep(Protocol):
    """A step of a plan, as `make_train_step` makes it."""

    @property
    def plan(self) -> Plan:
        """Plan of the step."""
        ...

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, PyTree]:
        """Runs the step; the state is donated."""
        ...


@dataclasses.dataclass(frozen=True)
class ReplayStep:
    """A step that replays: the same model, loss and optimizer on other devices.

    Attributes:
      step: Step made by `make_train_step` for another plan, such as one for the same
        mesh with its ranks exchanged, or for a mesh of another shape.
      tx: Optimizer that it was made with.
    """

    step: PlannedStep
    tx: optax.GradientTransformation

    @property
    def plan(self) -> Plan:
        """Plan of the step."""
        return self.step.plan


class ReplayCheck:
    """Train step that replays some of its steps and checks the state between all.

    Before each step, the shards' digests must equal those after the previous step.
    Every `every` steps, the step is also replayed from a host copy on the first replay
    plan. Parameters, optimizer state, model state, loss and gradient norm must be
    equal; gradients are compared by what they make of moments and parameters. If they
    differ, the second replay decides: the one of three that differs is wrong.

    During a replay its devices store its state beside the new one.

    Args:
      checked: Step to check, with its optimizer.
      replays: Two replay steps; the second is compiled and run only if the first
        differs.
      every: Interval of steps to replay, by `state.step`; 0 for none.
      rtol: None to compare bits, where ranks are exchanged on a mesh of the same shape;
        else the largest difference of an element, relative to the largest magnitude in
        its leaf, where the mesh sums in another order.

    Raises:
      ValueError: If `every` is negative, there are not two replays, `rtol` is
        negative or not finite, or the job has several processes: shards are compared
        where they are, and a process sees its own alone.

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
        if jax.process_count() > 1:
            raise ValueError(
                f"ReplayCheck compares the shards of one process, and this job has "
                f"{jax.process_count()}. Run all devices of a replay in one process."
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
        is_due = self._every > 0 and number % self._every == 0
        kept = _on_host(state) if is_due else None
        new, metrics = self._checked.step(state, batch)
        self._last = device_digests(new)
        if kept is not None:
            self._check_replayed(kept, batch, new, metrics, number)
        return new, metrics

    def reset(self) -> None:
        """Forgets the last step, for a state that comes from elsewhere."""
        self._last = None

    def _check_unchanged(self, state: TrainState, number: int) -> None:
        if self._last is None:
            return
        changed = self._last.changes(device_digests(state))
        if changed:
            leaves = tuple(sorted({n for names in changed.values() for n in names}))
            raise CorruptionError(
                CorruptionReport(number, leaves, "state", tuple(changed))
            )

    def _check_replayed(
        self,
        kept: TrainState,
        batch: PyTree,
        new: TrainState,
        metrics: PyTree,
        number: int,
    ) -> None:
        results = [(new, metrics), self._replayed(0, kept, batch)]
        leaves = self._differences(results[0], results[1])
        if not leaves:
            return
        results.append(self._replayed(1, kept, batch))
        if not self._differences(results[1], results[2]):
            wrong, right, what = 0, 1, "step"
        elif not self._differences(results[0], results[2]):
            wrong, right, what = 1, 0, "replay"
        else:
            raise CorruptionError(CorruptionReport(number, leaves, "undecided"))
        run = (self._checked, *self._replays)[wrong]
        there = [reshard(s, run.plan, run.tx) for s in (kept, results[right][0])]
        devices = suspect_devices(
            there[0],
            results[wrong][0],
            there[1],
            run.plan.mesh,
            (_rank_losses(results[wrong][1]), _rank_losses(results[right][1])),
        )
        raise CorruptionError(CorruptionReport(number, leaves, what, devices))

    def _replayed(self, index: int, kept: TrainState, batch: PyTree) -> Any:
        replay = self._replays[index]
        return replay.step(reshard(kept, replay.plan, replay.tx), batch)

    def _differences(self, a: Any, b: Any) -> tuple[str, ...]:
        """Returns the names of leaves and metrics that differ between two results."""
        (state, metrics), (other, others) = a, b
        if self._rtol is None:
            leaves = state_digest(state).differences(state_digest(other))
        else:
            leaves = _beyond(state, other, self._rtol)
        return (*leaves, *_beyond(_scalars(metrics), _scalars(others), self._rtol))


def with_rank_losses(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the loss of each data rank to `aux`, by which a report can name a rank.

    Args:
      loss_fn: Loss function that returns `(loss, aux)`, `aux` a dict; the sum and the
        count of a per-token loss count as the loss.

    Returns:
      Loss function for `make_train_step(..., has_aux=True)`.

    Examples:
      >>> def loss_and_aux(model, batch):
      ...     return loss_fn(model, batch), {}
      >>> recorded = fsdp.replay.with_rank_losses(loss_and_aux)
      >>> step = fsdp.make_train_step(plan, recorded, tx, has_aux=True)
      >>> state = fsdp.init_state(plan, tx, params)
      >>> state, metrics = step(state, batch)
      >>> metrics["aux"]["rank_losses"].shape
      (8,)
    """

    @functools.wraps(loss_fn)
    def recorded(*args, **kwargs):
        loss, aux = loss_fn(*args, **kwargs)
        own = loss[0] if isinstance(loss, tuple) else loss
        own = jax.lax.stop_gradient(jnp.asarray(own, jnp.float32))
        return loss, {**aux, RANK_LOSSES: own[None]}

    return recorded


def _on_host(state: TrainState) -> TrainState:
    """Copies every shard to host memory; the state keeps its own."""
    return jax.block_until_ready(
        jax.tree.map(
            lambda x: jax.device_put(x, x.sharding.with_memory_kind("pinned_host")),
            state,
        )
    )


def _scalars(metrics: PyTree) -> dict[str, Any]:
    return {name: metrics[name] for name in ("loss", "grad_norm")}


def _rank_losses(metrics: PyTree) -> np.ndarray | None:
    aux = metrics.get("aux")
    losses = aux.get(RANK_LOSSES) if isinstance(aux, dict) else None
    return None if losses is None else np.asarray(losses, np.float32)


def _beyond(a: PyTree, b: PyTree, rtol: float | None) -> tuple[str, ...]:
    """Returns the names of leaves that differ by more than the bound."""
    left, right = flatten(a), flatten(b)
    return tuple(
        name
        for name, leaf in left.items()
        if _is_beyond(_logical(leaf), _logical(right[name]), rtol)
    )


def _logical(leaf: Any) -> np.ndarray:
    return np.asarray(leaf.value)[tuple(map(slice, leaf.shape))]


def _is_beyond(a: np.ndarray, b: np.ndarray, rtol: float | None) -> bool:
    if a.tobytes() == b.tobytes():
        return False
    if rtol is None or not jnp.issubdtype(a.dtype, jnp.floating):
        return True
    a, b = a.astype(np.float64), b.astype(np.float64)
    # Not `>`: a comparison with NaN is false.
    return not bool((np.abs(a - b) <= rtol * np.abs(b).max()).all())
