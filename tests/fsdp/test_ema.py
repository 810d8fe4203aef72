"""An average of the weights is sharded, saved and resharded as they are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.compare import host
from helpers.errors import facts

import fsdp_jax as fsdp

DECAY = 0.75
# Three float32 averages of numbers near 1, against the same in float64.
ROUNDING = 1e-6


ema_of_params = fsdp.optim.ema_of_params
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
    alone = fsdp.checkpoint.load_average(tmp_path, plan_of("optim", 4).params)
    jax.tree.map(np.testing.assert_array_equal, host(alone), expected)


def test_an_average_in_16_bits_would_stand_still():
    weights = {"w": jnp.ones(4, jnp.bfloat16)}
    tx = ema_of_params(0.999)
    state = tx.init(weights)
    for _ in range(100):
        _, state = tx.update({"w": jnp.zeros(4)}, state, {"w": weights["w"] * 2})
    np.testing.assert_allclose(state.ema["w"], 2 - 0.999**100, rtol=1e-5)


def test_what_is_no_decay_or_has_no_average_is_refused(tmp_path):
    for decay in (1.0, -0.1):
        with pytest.raises(ValueError, match=facts(decay, 0, 1)):
            ema_of_params(decay)
    plan = plan_of("optim")
    params = fsdp.init_params(plan, jax.random.key(0))
    fsdp.save(tmp_path, fsdp.init_state(plan, optax.sgd(0.1), params))
    with pytest.raises(ValueError, match=facts("Step 0", str(tmp_path))):
        fsdp.checkpoint.load_average(tmp_path, plan.params)


def test_an_update_without_parameters_is_refused():
    tx = fsdp.optim.ema_of_params(0.9)
    with pytest.raises(ValueError, match=facts("ema_of_params", "params")):
        tx.update({"w": jnp.ones(2)}, tx.init({"w": jnp.ones(2)}))
