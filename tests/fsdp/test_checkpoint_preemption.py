"""SIGTERM on one host: all save the same step and exit, and the next start goes on."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint.checkpoint_managers as policies
import pytest
from flax import nnx
from helpers.processes import run_processes

import fsdp_jax as fsdp

PROCESSES = 4
WIDTH = 16
KILLED_BY_SIGTERM = 143
LAST = 2000  # never reached
TX = optax.adamw(1e-2)


def loss(model, batch):
    return jnp.mean((model(batch) - batch) ** 2)


def make_step() -> fsdp.training.TrainStep:
    plan = fsdp.fully_shard(
        lambda key: nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(key)), fsdp.make_mesh()
    )
    return fsdp.make_train_step(plan, loss, TX)


def start(step: fsdp.training.TrainStep) -> fsdp.TrainState:
    return fsdp.init_state(
        step.plan, TX, fsdp.init_params(step.plan, jax.random.key(0))
    )


def batch(step: fsdp.training.TrainStep, number: int) -> jax.Array:
    rows = np.random.default_rng(number).normal(size=(16, WIDTH)).astype(np.float32)
    sharding = step.plan.batch_sharding
    return jax.make_array_from_callback(rows.shape, sharding, lambda i: rows[i])


def open_checkpointer(directory: str) -> fsdp.Checkpointer:
    """Saves nothing but when it is told to stop."""
    never = policies.FixedIntervalPolicy(10 * LAST)
    return fsdp.Checkpointer(directory, save_decision_policy=never)


def train_until_sigterm(directory: str) -> None:
    """Process 2 alone gets the signal, after its third step."""
    step = make_step()
    with open_checkpointer(directory) as checkpointer:
        assert checkpointer.resume(fsdp.abstract_state(step.plan, TX)) is None
        state = start(step)
        for number in range(1, LAST):
            state, _ = step(state, batch(step, number))
            if number == 3 and jax.process_index() == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            checkpointer.save(number, state)
            time.sleep(0.02)


def go_on(directory: str) -> dict:
    """What comes of two more steps, after the stop and without one."""
    step = make_step()
    with open_checkpointer(directory) as checkpointer:
        state = checkpointer.resume(fsdp.abstract_state(step.plan, TX))
        stopped = int(state.step)
        for number in range(stopped + 1, stopped + 3):
            state, _ = step(state, batch(step, number))
            checkpointer.save(number, state)
    straight = start(step)
    for number in range(1, stopped + 3):
        straight, _ = step(straight, batch(step, number))
    return {
        "stopped": stopped,
        "same": [a == b for a, b in zip(bits(state), bits(straight), strict=True)],
    }


def bits(state: fsdp.TrainState) -> list[bytes]:
    leaves = jax.tree.leaves((state.step, state.params, state.opt_state))
    return [
        np.asarray(shard.data).tobytes()
        for leaf in leaves
        for shard in leaf.addressable_shards
    ]


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """Of a run that was stopped: every process of it exited as SIGTERM has it."""
    directory = tmp_path_factory.mktemp("run")
    run_processes(
        train_until_sigterm, PROCESSES, str(directory), exit_code=KILLED_BY_SIGTERM
    )
    return directory


def test_sigterm_on_one_host_makes_all_save_the_same_step_and_exit(directory):
    newest = fsdp.latest_step(directory)
    assert newest is not None and 3 <= newest < LAST
    assert [p.name for p in directory.iterdir() if p.is_dir()] == [str(newest)]
    fsdp.checkpoint.verify(directory)


def test_the_next_start_goes_on_to_the_same_bits(directory):
    newest = fsdp.latest_step(directory)
    for process in run_processes(go_on, PROCESSES, str(directory)):
        assert process["stopped"] == newest
        assert process["same"] and all(process["same"])
