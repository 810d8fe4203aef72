"""An average of the weights is sharded, saved and resharded as they are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.compare import host

import fsdp_jax as fsdp

DECAY = 0.75
# Three float32 averages of numbers near 1, against the same in float64.
ROUNDING = 1e-6


def ema_of_params(decay: float) -> optax.GradientTransformation:
    """The recipe of docs/pages/how-to/fine-tune.md."""

    def init(params):
        return optax.EmaState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.copy, params))

    def update(updates, state, params=None):
        new = optax.apply_updates(params, updates)
        ema = optax.incremental_update(new, state.ema, 1 - decay)
        return updates, optax.EmaState(state.count + 1, ema)

    return optax.GradientTransformation(init, update)


TX = optax.chain(optax.adamw(0.1), ema_of_params(DECAY))


def make_weights(key):
    return {"w": jax.random.normal(key, (16, 8)), "odd": jnp.ones((13, 3))}


def loss_fn(weights, x):
    return jnp.mean((x @ weights["w"]) ** 2) + jnp.mean(weights["odd"] ** 2)


def plan_of(strategy, devices=8):
    mesh = fsdp.make_mesh(devices=jax.devices()[:devices])
    config = fsdp.FSDPConfig(zero_dp_strategy=strategy)
    return fsdp.fully_shard(make_weights, mesh, config=config)


def average(state):
    return optax.tree.get(state.opt_state, "ema")


@pytest.fixture(scope="module")
def trained():
    plan = plan_of("optim_grads_params")
    state = fsdp.init_state(plan, TX, fsdp.init_params(plan, jax.random.key(0)))
    step = fsdp.make_train_step(plan, loss_fn, TX)
    x = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
    seen = [host(fsdp.sharding.unpack(state.params))]
    for _ in range(3):
        state, _ = step(state, x)
        seen.append(host(fsdp.sharding.unpack(state.params)))
    return state, seen


def test_it_is_the_average_of_the_weights_after_each_step(trained):
    state, (first, *others) = trained
    expected = {name: leaf.astype(np.float64) for name, leaf in first.items()}
    for weights in others:
        for name, leaf in weights.items():
            expected[name] = DECAY * expected[name] + (1 - DECAY) * leaf
    found = host(fsdp.sharding.unpack(average(state)))
    for name, leaf in expected.items():
        np.testing.assert_allclose(found[name], leaf, rtol=ROUNDING, atol=ROUNDING)
        assert np.abs(leaf - others[-1][name]).max() > 0.01


def test_it_is_split_as_the_weights_are(trained):
    state, _ = trained
    ours, theirs = jax.tree.leaves(average(state)), jax.tree.leaves(state.params)
    assert [leaf.sharding for leaf in ours] == [leaf.sharding for leaf in theirs]
    assert not any(leaf.sharding.is_fully_replicated for leaf in ours)


def test_it_loads_on_another_mesh_to_the_bit(trained, tmp_path):
    state, _ = trained
    fsdp.save(tmp_path, state)
    other = fsdp.load(tmp_path, fsdp.abstract_state(plan_of("optim", 2), TX))
    found, expected = (host(fsdp.sharding.unpack(average(s))) for s in (other, state))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
