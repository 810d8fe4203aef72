"""A model mapped over rows has one gradient for all of them, and one reduction."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fsdp_jax as fsdp
from fsdp_jax.hlo._program import communicated_arrays, program_of

UNITS, ROWS, WIDTH = 3, 16, 32


def make(key):
    weights = jax.random.normal(key, (UNITS, WIDTH, WIDTH)) * 0.3
    return {"layers": {"w": weights}}


def rows():
    return jax.random.normal(jax.random.key(1), (ROWS, WIDTH))


def block(w, x):
    return jnp.tanh(x @ w["w"]), None


def stack(params, x):
    return fsdp.scan(block, params["layers"], x, prefetch=1)[0]


def mapped(params, batch):
    return jnp.mean(jax.vmap(lambda x: stack(params, x))(batch) ** 2)


def as_one(params, batch):
    return jnp.mean(stack(params, batch) ** 2)


def mapped_twice(params, batch):
    pairs = batch.reshape(-1, 2, WIDTH)
    return jnp.mean(jax.vmap(jax.vmap(lambda x: stack(params, x)))(pairs) ** 2)


def with_penalty(params, batch):
    slopes = jax.vmap(jax.grad(lambda x: stack(params, x).sum()))(batch)
    return jnp.mean(slopes**2)


def penalty_as_one(params, batch):
    return jnp.mean(jax.grad(lambda x: stack(params, x).sum())(batch) ** 2)


def plan_of():
    mesh = fsdp.make_mesh(devices=jax.devices()[:4])
    return fsdp.fully_shard(make, mesh, [fsdp.Stacked("layers")])


def gradients(loss):
    plan = plan_of()
    params = fsdp.init_params(plan, jax.random.key(0))
    return fsdp.unshard(fsdp.value_and_grad(plan, loss)(params, rows())[1])


# Sums over rows in another order, in float32.
RELATIVE = 2e-6


@pytest.mark.parametrize(
    "loss, plain",
    [(mapped, as_one), (mapped_twice, as_one), (with_penalty, penalty_as_one)],
)
def test_gradients_are_those_of_all_rows_at_once(loss, plain):
    got, want = (gradients(fn)["layers"]["w"] for fn in (loss, plain))
    np.testing.assert_allclose(got, want, atol=RELATIVE * np.abs(want).max())
    # The gradient of the first row alone is another one.
    other = gradients(lambda params, batch: loss(params, batch[:2]))["layers"]["w"]
    assert np.abs(other - want).max() > 1e-2 * np.abs(want).max()


@pytest.mark.parametrize("loss", [as_one, mapped, mapped_twice])
def test_a_gradient_is_reduced_once_and_not_for_each_row(loss):
    plan, tx = plan_of(), optax.sgd(0.1)
    step = fsdp.make_train_step(plan, loss, tx)
    lowered = step.lower(fsdp.abstract_state(plan, tx), rows())
    arrays = communicated_arrays(program_of(lowered, plan.mesh), plan.mesh)
    sent = {one.sent for one in arrays if one.op == "reduce-scatter"}
    assert sent == {(WIDTH, WIDTH)}
