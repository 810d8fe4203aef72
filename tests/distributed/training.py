"""What one process of a job sees that trains, evaluates, saves and loads."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fsdp_jax as fsdp

LAYERS, WIDTH, BATCH = 3, 24, 16
TX = optax.adamw(optax.exponential_decay(1e-2, 1, 0.9), eps=1e-3, weight_decay=0.01)
# zero_dp_strategy, outer_dp_sharding_strategy, devices on dp_outer
STRATEGIES = {
    "DDP": (0, 0, 1),
    "ZeRO-1": (1, 0, 1),
    "ZeRO-2 x 2": (2, 0, 2),
    "ZeRO-3": (3, 0, 1),
    "HFSDP": (3, 1, 2),
}


def make_model(key: jax.Array) -> dict[str, Any]:
    keys = jax.random.split(key, LAYERS)
    return {
        f"layer{n}": {
            "w": jax.random.normal(keys[n], (WIDTH, WIDTH)) / WIDTH**0.5,
            "b": jnp.zeros(WIDTH),
        }
        for n in range(LAYERS)
    }


@fsdp.unit
def layer(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ weights["w"] + weights["b"][None])


def loss_fn(model: dict[str, Any], batch: jax.Array) -> jax.Array:
    y = batch
    for n in range(LAYERS):
        y = layer(model[f"layer{n}"], y)
    return jnp.mean((y - jnp.roll(batch, 1, axis=1)) ** 2)


def make_plan(name: str) -> fsdp.Plan:
    zero, outer, num_outer = STRATEGIES[name]
    config = fsdp.FSDPConfig(zero_dp_strategy=zero, outer_dp_sharding_strategy=outer)
    mesh = fsdp.make_mesh(dp_outer=num_outer)
    return fsdp.fully_shard(make_model, mesh, units=["layer*"], config=config)


def batches(plan: fsdp.Plan) -> Iterator[jax.Array]:
    """Global batches, of which each process makes its own rows alone."""
    rows = np.random.default_rng(0).normal(size=(8 * BATCH, WIDTH)).astype(np.float32)
    source = fsdp.HostBatches(rows, BATCH, fsdp.host_shard(plan.mesh))
    for number in range(len(source)):
        yield fsdp.global_batch(plan.mesh, source[number], BATCH)


def start(plan: fsdp.Plan) -> fsdp.TrainState:
    return fsdp.init_state(plan, TX, fsdp.init_params(plan, jax.random.key(0)))


def train(name: str) -> dict[str, Any]:
    """Losses of three steps, and of an evaluation and the weights after them."""
    plan = make_plan(name)
    step = fsdp.make_train_step(plan, loss_fn, TX)
    state, losses, stream = start(plan), [], batches(plan)
    for _ in range(3):
        state, metrics = step(state, next(stream))
        losses.append(float(metrics["loss"]))
    evaluated = fsdp.make_eval_step(plan, loss_fn)(state.params, next(stream))
    whole = jax.tree.leaves(fsdp.unshard(state.params))
    weights = np.concatenate([np.ravel(np.asarray(leaf)) for leaf in whole])
    return {
        "losses": losses,
        "evaluated": float(evaluated["loss"]),
        "weights": weights.tolist(),
    }


def digest(state: fsdp.TrainState) -> str:
    """Of every bit of a state, whole."""
    sha256 = hashlib.sha256()
    for name, leaf in fsdp.sharding.named_leaves(state):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        whole = fsdp.unshard(leaf)
        sha256.update(name.encode() + np.asarray(whole.addressable_data(0)).tobytes())
    return sha256.hexdigest()


def step_save_step_load_step(directory: str) -> dict[str, Any]:
    """As in verl's test_fsdp_ckpt.py: A, save, B, load, B again, with a scheduler."""
    plan = make_plan("ZeRO-3")
    step = fsdp.make_train_step(plan, loss_fn, TX)
    first, second, *_ = batches(plan)
    state, _ = step(start(plan), first)
    fsdp.save(directory, state)
    saved = digest(state)
    state, metrics = step(state, second)
    loaded = fsdp.load(directory, fsdp.abstract_state(plan, TX))
    again = digest(loaded)
    loaded, repeated = step(loaded, second)
    return {
        "saved": [saved, again],
        "after": [digest(state), digest(loaded)],
        "losses": [float(metrics["loss"]), float(repeated["loss"])],
    }


def go_on(directory: str) -> dict[str, Any]:
    """What another job finds that another has saved, and its next step."""
    plan = make_plan("ZeRO-3")
    state = fsdp.load(directory, fsdp.abstract_state(plan, TX))
    found = digest(state)
    _, second, *_ = batches(plan)
    _, metrics = fsdp.make_train_step(plan, loss_fn, TX)(state, second)
    return {"found": found, "loss": float(metrics["loss"])}
