"""Stacks in host memory are updated one layer at a time, where layers are apart."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.compare import host

import fsdp_jax as fsdp
from fsdp_jax._scopes import BY_LAYER, is_in

LAYERS, EMBED, MLP, ROWS = 4, 16, 32, 16
UNITS = (fsdp.Stacked("layers"),)
WHOLE = fsdp.OffloadPolicy(params=True, min_elements=100)
STREAM = fsdp.OffloadPolicy(params=True, min_elements=100, stream_params=True)
X = np.random.default_rng(0).normal(size=(ROWS, EMBED)).astype(np.float32)
# XLA:CPU computes the ends of rows by other instructions than their middle: a rounding
# of the last bit of an element of float32, which two steps of Adam carry on.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-7}


def make_weights(key):
    up, down = jax.random.split(key)
    return {
        "layers": {
            "up": 0.3 * jax.random.normal(up, (LAYERS, EMBED, MLP)),
            "down": 0.3 * jax.random.normal(down, (LAYERS, MLP, EMBED)),
        }
    }


def loss_fn(weights, batch):
    def layer(w, x):
        return x + jnp.tanh(x @ w["up"]) @ w["down"], None

    return jnp.mean(fsdp.scan(layer, weights["layers"], batch)[0] ** 2)


def of_gradients(mix):
    """An optimizer whose update of a stack is a function of its gradient."""
    return optax.stateless(lambda grads, params: jax.tree.map(mix, grads))


def of_weights(mix):
    return optax.stateless(lambda grads, params: jax.tree.map(mix, grads, params))


def by_size(grad):
    return -0.1 * grad / grad.shape[0]


def by_number(grad):
    numbers = jnp.arange(grad.shape[0], dtype=grad.dtype)
    return -0.1 * grad * numbers[:, None, None]


def to_the_mean(grad, weight):
    return -0.1 * (grad + weight.mean(0, keepdims=True))


def of_the_next(grad, weight):
    return -0.1 * (grad + 0.1 * jnp.roll(weight, 1, axis=0))


def scheduled():
    return optax.adamw(optax.linear_schedule(1e-2, 1e-3, 5))


# What takes a layer at a time: of two stacks, one loop each.
APART = {
    "adamw with a schedule": scheduled(),
    "norm clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
    "lion": optax.lion(1e-3),
    "by another layer's gradient": of_gradients(lambda g: -0.1 * jnp.flip(g, 0)),
    "by the number of the layer": of_gradients(by_number),
}
# What a layer cannot tell from itself, and is updated as a whole.
TOGETHER = {
    "towards the mean weight": of_weights(to_the_mean),
    "towards the next layer": of_weights(of_the_next),
    "by the number of layers": of_gradients(by_size),
    "from the mean gradient": of_gradients(
        lambda g: -0.1 * (g - g.mean(0, keepdims=True))
    ),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
}


def plan_of(offload):
    config = fsdp.FSDPConfig(offload=offload)
    return fsdp.fully_shard(make_weights, fsdp.make_mesh(), UNITS, config)


def trained(offload, tx, **options):
    plan = plan_of(offload)
    step = fsdp.make_train_step(plan, loss_fn, tx, **options)
    state = fsdp.init_state(plan, tx, fsdp.init_params(plan, jax.random.key(0)))
    for _ in range(2):
        state, _ = step(state, X)
    return host(state.params), host(state.opt_state)


def loops(tx, offload=STREAM, **options):
    plan = plan_of(offload)
    step = fsdp.make_train_step(plan, loss_fn, tx, **options)
    traced = step.jitted.trace(fsdp.abstract_state(plan, tx), X).jaxpr
    return sum(
        eqn.primitive.name in ("scan", "while")
        and is_in(eqn.source_info.name_stack, BY_LAYER)
        for eqn in traced.jaxpr.eqns
    )


@pytest.mark.parametrize("name", APART | TOGETHER)
def test_the_numbers_are_those_of_an_update_of_whole_stacks(name):
    tx = (APART | TOGETHER)[name]
    got, want = trained(STREAM, tx), trained(WHOLE, tx)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **TOLERANCE), got, want)


def test_a_layer_of_the_wrong_gradient_would_miss_the_tolerance():
    right, wrong = (trained(WHOLE, of_gradients(f)) for f in (by_number, by_size))
    differences = jax.tree.map(lambda a, b: np.abs(a - b).max(), right, wrong)
    assert max(jax.tree.leaves(differences)) > 100 * TOLERANCE["atol"]


@pytest.mark.parametrize("name", APART)
def test_an_update_of_each_layer_by_itself_is_a_loop_over_layers(name):
    assert loops(APART[name]) == 2
    assert loops(APART[name], WHOLE) == 0


@pytest.mark.parametrize("name", TOGETHER)
def test_an_update_that_mixes_layers_reads_whole_stacks(name):
    assert loops(TOGETHER[name]) == 0


def test_steps_that_may_be_skipped_are_updated_by_layer_too():
    assert loops(scheduled(), on_nonfinite="skip") == 2
    got, want = (
        trained(offload, scheduled(), on_nonfinite="skip")
        for offload in (STREAM, WHOLE)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **TOLERANCE), got, want)
