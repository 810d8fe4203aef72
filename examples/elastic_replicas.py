"""An autoencoder that goes on when a process dies, with the replicas that are left.

    fsdp-jax launch --processes 4 --elastic 2:4 -- python examples/elastic_replicas.py
        --rows ROWS.npy --save RUN --local /scratch/RUN    # in one line

ROWS.npy is one array of numbers, `[rows, width]`. Each process is a replica here. When
one dies, the launcher starts the program again with fewer: it goes on from its newest
step, which is on the local disk, with as many more microbatches, so that each step has
the same rows and the same loss. A minute later SIGTERM ends it after a step, and it
goes on with all replicas.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint.checkpoint_managers as policies
import tyro

import fsdp_jax as fsdp


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a run.

    Attributes:
      rows: File of the data, one array in numpy's format.
      save: Directory of the checkpoints, which all hosts see.
      local: Directory on a disk of the machine, for a checkpoint each step.
      steps: Last step.
      batch: Rows of a global batch, whatever the number of replicas.
      microbatches: Microbatches of a step with all replicas.
      save_every: Interval of steps to save.
      layers: Number of layers.
      lr: Learning rate.
      losses: File for the loss of each step, a JSON object a line.
    """

    rows: Path
    save: Path
    local: Path
    steps: int = 1000
    batch: int = 64
    microbatches: int = 1
    save_every: int = 100
    layers: int = 4
    lr: float = 1e-3
    losses: Path | None = None


@fsdp.unit
def layer(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Returns activations, `[rows, width]`."""
    return x + jnp.tanh(x @ weights["w"] + weights["b"][None])


def loss_fn(model: dict[str, Any], batch: jax.Array) -> jax.Array:
    """Returns the mean squared error of this device's rows, each rotated by one."""
    y = batch
    for weights in model.values():
        y = layer(weights, y)
    return jnp.mean((y - jnp.roll(batch, 1, axis=1)) ** 2)


def make_model(width: int, layers: int, key: jax.Array) -> dict[str, Any]:
    """Returns random weights."""
    return {
        f"layer{n}": {
            "w": jax.random.normal(jax.random.fold_in(key, n), (width, width)) / width,
            "b": jnp.zeros(width),
        }
        for n in range(layers)
    }


def train(options: Options) -> dict[int, float]:
    """Trains, and returns the loss of each step that was done."""
    fsdp.initialize(config=vars(options))  # Joins the job, if there is one.
    # Without `launch --elastic`: one replica, which is all there is.
    generation = fsdp.launch.generation() or fsdp.launch.Generation()
    mesh = fsdp.make_mesh(dp_outer=generation.num_replicas)
    data_ranks = mesh.shape["dp_shard"]
    rows = np.load(options.rows, mmap_mode="r")
    plan = fsdp.fully_shard(
        lambda key: make_model(rows.shape[1], options.layers, key),
        mesh,
        units=["layer*"],
    )
    tx = optax.adamw(options.lr)
    step = fsdp.make_train_step(
        plan,
        loss_fn,
        tx,
        num_microbatches=generation.microbatches_for(
            options.batch, options.microbatches, data_ranks=data_ranks
        ),
    )
    # The batch of a step is known by its number: there is no position to save.
    batches = fsdp.HostBatches(rows, options.batch, fsdp.host_shard(mesh))
    losses = {}
    with fsdp.Checkpointer(
        options.save,
        save_decision_policy=policies.FixedIntervalPolicy(options.save_every),
        local=fsdp.checkpoint.LocalCheckpoints(options.local, every=1),
    ) as checkpointer:
        state = checkpointer.resume(fsdp.abstract_state(plan, tx))
        if state is None:
            params = fsdp.init_params(plan, jax.random.key(0))
            state = fsdp.init_state(plan, tx, params)
        for number in range(int(state.step) + 1, options.steps + 1):
            # The launcher tells the step that a generation goes on with.
            fsdp.launch.report_progress("training", number)
            mine = np.asarray(batches[number % len(batches)])
            state, metrics = step(state, fsdp.global_batch(mesh, mine, options.batch))
            losses[number] = float(metrics["loss"])
            if options.losses and jax.process_index() == 0:
                with options.losses.open("a") as file:
                    line = {"step": number, "loss": losses[number]}
                    print(json.dumps(line), file=file)
            checkpointer.save(number, state)  # After every step: it heeds SIGTERM.
    return losses


if __name__ == "__main__":
    train(tyro.cli(Options))
