"""A train step that also returns what happened in it, as digests."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from fsdp_jax._tree import PyTree
from fsdp_jax.replay._digest import digest_function, stored_arrays
from fsdp_jax.replay._events import Event, Events
from fsdp_jax.replay._record import run_recorded
from fsdp_jax.training._memory_check import MemoryWatch
from fsdp_jax.training._state import TrainState
from fsdp_jax.training._train_step import TrainStep

_EVENTS = "events"


class RecordedStep:
    """Runs a step, compiled once more, with digests beside its operations.

    Args:
      step: Step from `make_train_step`.
    """

    def __init__(self, step: TrainStep):
        self._step = step
        self._recorded: TrainStep | None = None

    def __call__(
        self, state: TrainState, batch: PyTree
    ) -> tuple[TrainState, dict[str, Any], Events]:
        """Returns the new state, the metrics and the events; the state is donated.

        The first event is the state as the step reads it, with a digest for each device
        and leaf.
        """
        if self._recorded is None:
            self._recorded = _recorded(self._step, state)
        new, metrics = self._recorded(state, batch)
        events = jax.device_get(metrics[_EVENTS])
        return new, {n: x for n, x in metrics.items() if n != _EVENTS}, events


def _recorded(step: TrainStep, like: TrainState) -> TrainStep:
    """Makes the step whose metrics include its events.

    Args:
      step: Step from `make_train_step`.
      like: State with the shardings of those that the step gets.
    """
    digests = digest_function(stored_arrays(like))
    replicated = NamedSharding(step.plan.mesh, PartitionSpec())

    def run(state, batch):
        closed, shapes = jax.make_jaxpr(step.jitted, return_shape=True)(state, batch)
        values, events = run_recorded(closed, jax.tree.leaves((state, batch)))
        new, metrics = jax.tree.unflatten(jax.tree.structure(shapes), values)
        read = digests(*(array for array, _ in stored_arrays(state).values()))
        # Replicated, so that every process reads those of all devices.
        events = jax.lax.with_sharding_constraint(
            (Event(read, True), *events), replicated
        )
        return new, {**metrics, _EVENTS: events}

    jitted = jax.jit(
        run,
        donate_argnums=0,
        out_shardings=(jax.tree.map(lambda x: x.sharding, like), None),
        compiler_options=step.compiler_options,
    )
    # Another program, whose memory is checked too.
    watch = MemoryWatch(step.watch.limit)
    return dataclasses.replace(step, jitted=jitted, watch=watch)
