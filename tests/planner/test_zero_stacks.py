"""Zeros that a loop over layers stacks for backward are not in memory."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers.blocks import make_list
from jax import lax

import fsdp_jax as fsdp
from fsdp_jax.planner._memory import predict_memory
from fsdp_jax.planner.liveness import _lifetimes
from fsdp_jax.training._memory_check import compiled_bytes

WIDTH, LAYERS, ROWS = 256, 6, 32_768
TX = optax.adam(1e-2)


def make_stack(key):
    layers = make_list(key, WIDTH, LAYERS)["layers"]
    return {"layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)}


def loss_with(activation):
    unit = fsdp.unit(lambda w, x: x + activation(x @ w["up"]) @ w["down"])

    def loss(params, batch):
        x, _ = lax.scan(lambda x, w: (unit(w, x), None), batch, params["layers"])
        return (x**2).mean()

    return loss


ACTIVATIONS = {
    "relu": jax.nn.relu,
    "where": lambda x: jnp.where(x > 0, x, 0.0),
    "tanh": jnp.tanh,
}


@functools.cache
def planned(name, gpus):
    mesh = fsdp.make_mesh(devices=list(gpus))
    plan = fsdp.fully_shard(make_stack, mesh, [fsdp.Stacked("layers")])
    batch = jax.ShapeDtypeStruct(
        (ROWS, WIDTH), jnp.float32, sharding=plan.batch_sharding
    )
    step = fsdp.make_train_step(plan, loss_with(ACTIVATIONS[name]), TX)
    state = fsdp.abstract_state(plan, TX)
    return plan, state, batch, step.jitted.trace(state, batch)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_memory_of_activations_is_predicted(name, gpus):
    plan, state, batch, traced = planned(name, tuple(gpus))
    compiled = compiled_bytes(traced.lower().compile())
    predicted = predict_memory(plan, state, batch, traced.jaxpr).total
    assert predicted / compiled == pytest.approx(1, abs=0.1)


def test_stacked_zeros_of_a_relu_would_be_half_as_much_again(gpus, monkeypatch):
    plan, state, batch, traced = planned("relu", tuple(gpus))
    known = predict_memory(plan, state, batch, traced.jaxpr)
    monkeypatch.setattr(_lifetimes, "stacks_of_zeros", lambda _: set())
    kept = predict_memory(plan, state, batch, traced.jaxpr)
    # One array of the hidden width for each layer.
    stack = LAYERS * ROWS // plan.mesh.size * 2 * WIDTH * 4
    assert kept.saved - known.saved == stack > known.total / 3
