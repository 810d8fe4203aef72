"""Numbers and functions among the leaves of a stack: every unit has them."""

from __future__ import annotations

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.compare import host, worst

import fsdp_jax as fsdp

LAYERS, WIDTH, ROWS = 4, 16, 16
RATE = 0.25
# The same float32 numbers, added up in other orders.
CLOSE = 1e-6


class Block(eqx.Module):
    """A layer with a rate, a flag and a function beside its weights."""

    linear: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    activation: Callable[[jax.Array], jax.Array]

    def __init__(self, key):
        self.activation = jnp.tanh
        self.linear = eqx.nn.Linear(WIDTH, WIDTH, key=key)
        self.dropout = eqx.nn.Dropout(RATE)

    def __call__(self, x):
        # The same mask wherever a row is: the law is of the rate.
        kept = self.dropout(jnp.ones(WIDTH), key=jax.random.key(0))
        return x + self.activation(jax.vmap(self.linear)(x) * kept[None])


def make_blocks(key):
    return eqx.filter_vmap(Block)(jax.random.split(key, LAYERS))


def run(block, x, static=None):
    return block(x if static is None else static * x), None


def loss_of(**options):
    def loss(blocks, batch):
        x, _ = fsdp.scan(run, blocks, batch["x"], **options)
        return jnp.mean((x - batch["y"]) ** 2)

    return loss


def by_hand(blocks, batch, scales=(1.0,) * LAYERS):
    """What the scan computes, a layer after the other."""
    arrays, rest = eqx.partition(blocks, eqx.is_array)
    x = batch["x"]
    for i, scale in enumerate(scales):
        x = eqx.combine(jax.tree.map(lambda leaf, i=i: leaf[i], arrays), rest)(
            scale * x
        )
    return jnp.mean((x - batch["y"]) ** 2)


def batch():
    x, y = np.random.default_rng(0).normal(size=(2, ROWS, WIDTH)).astype(np.float32)
    return {"x": x, "y": y}


def trained(loss, mesh, microbatches=1, **config):
    plan = fsdp.fully_shard(
        make_blocks, mesh, units=[Block], config=fsdp.FSDPConfig(**config)
    )
    tx = optax.sgd(0.5)
    step = fsdp.make_train_step(plan, loss, tx, num_microbatches=microbatches)
    state = fsdp.init_state(plan, tx, fsdp.init_params(plan, jax.random.key(0)))
    rows = jax.device_put(batch(), plan.batch_sharding)
    for _ in range(2):
        state, metrics = step(state, rows)
    return float(metrics["loss"]), jax.tree.leaves(host(state.params))


def alone(loss):
    """Two steps of gradient descent on one device, in plain JAX."""
    blocks = make_blocks(jax.random.key(0))
    for _ in range(2):
        value, grads = eqx.filter_value_and_grad(loss)(blocks, batch())
        blocks = eqx.apply_updates(blocks, jax.tree.map(lambda g: -0.5 * g, grads))
    return float(value), jax.tree.leaves(eqx.filter(blocks, eqx.is_array))


PIPELINE = fsdp.PipelineConfig("1f1b", virtual_stages=1)
PLACES = {
    "gathered ahead": ({}, {"prefetch": 1}, 1),
    "gathered at its entry": ({}, {"prefetch": 0}, 1),
    "in stages": ({"pp": 2}, {"pipeline": PIPELINE}, 2),
}


@pytest.mark.parametrize("place", PLACES)
def test_every_unit_has_the_constants_of_its_stack(place):
    axes, config, microbatches = PLACES[place]
    loss, params = trained(loss_of(), fsdp.make_mesh(**axes), microbatches, **config)
    expected, weights = alone(by_hand)
    assert loss == pytest.approx(expected, rel=CLOSE)
    assert worst(params, weights) < CLOSE


def test_units_of_other_static_values_have_them_too():
    scales = (0.5, 0.5, 1.0, 1.0)
    got = loss_of(static=scales)(make_blocks(jax.random.key(0)), batch())
    expected = by_hand(make_blocks(jax.random.key(0)), batch(), scales)
    assert float(got) == pytest.approx(float(expected), rel=CLOSE)


def test_another_rate_computes_something_else():
    blocks = make_blocks(jax.random.key(0))
    other = eqx.tree_at(lambda b: b.dropout.p, blocks, 0.5)
    values = [float(loss_of()(each, batch())) for each in (blocks, other)]
    assert abs(values[0] - values[1]) > 1000 * CLOSE
