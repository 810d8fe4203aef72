"""Model state under `pp`: a stage reads that of the microbatch that it runs."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.compare import host, worst
from helpers.errors import facts

import fsdp_jax as fsdp

LAYERS, EMBED, ROWS, MICROBATCHES = 4, 4, 16, 4
TX = optax.sgd(0.1)
# Sums of float32 in another order.
CLOSE = 1e-5


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(EMBED, EMBED, rngs=rngs)


def run_layer(layer, x, key, gain):
    kept = jax.random.bernoulli(key, 0.5, x.shape)
    return x + jnp.where(kept, jnp.tanh(gain * layer.up(x)), 0), None


class Model(nnx.Module):
    """Layers whose dropout keys, and whose gain, come from the model's state."""

    def __init__(self, key, late=False):
        rngs = nnx.Rngs(key)
        split = nnx.split_rngs(splits=LAYERS)
        self.layers = split(nnx.vmap(Layer))(rngs)
        self.drops = nnx.Rngs(dropout=7)
        self.gain = nnx.BatchStat(jnp.ones(()))
        self.shift = nnx.BatchStat(jnp.zeros(()))
        self.late = late

    def __call__(self, x):
        keys = jax.random.split(self.drops.dropout(), LAYERS)
        gain = self.gain[...]
        y, _ = fsdp.scan(run_layer, self.layers, x, (keys,), (gain,))
        self.gain[...] = 0.5 * gain + (y if self.late else x).mean()
        # Read and written behind the layers, by the last stage alone.
        y = y + self.shift[...]
        self.shift[...] = 0.5 * self.shift[...] + y.mean()
        return y


def loss_fn(model, batch):
    y = model(batch["x"])
    return (y**2).mean(), y.mean(-1)


def batch():
    x = np.random.default_rng(0).standard_normal((ROWS, EMBED))
    return {"x": x.astype(np.float32)}


def plan_of(mesh, late=False, **pipeline):
    config = fsdp.FSDPConfig(pipeline=fsdp.PipelineConfig(**pipeline))
    make = functools.partial(Model, late=late)
    return fsdp.fully_shard(make, mesh, [Layer], config)


@functools.cache
def trained(pp, schedule="1f1b", virtual_stages=1):
    """What two steps of four data ranks leave and report."""
    devices = jax.devices()[: 4 * pp]
    mesh = fsdp.make_mesh(pp=pp, devices=devices)
    plan = plan_of(mesh, schedule=schedule, virtual_stages=virtual_stages)
    step = fsdp.make_train_step(
        plan, loss_fn, TX, has_aux=True, num_microbatches=MICROBATCHES
    )
    state = fsdp.init_state(plan, TX, fsdp.init_params(plan, jax.random.key(0)))
    for _ in range(2):
        state, metrics = step(state, batch())
    params = host(fsdp.sharding.unpack(state.params))
    left = [np.asarray(x) for x in jax.tree.leaves(host_state(state.model_state))]
    return params, left, host(metrics)


def host_state(state):
    """The numbers of a state, for keys those of which they are made."""
    is_key = functools.partial(jnp.issubdtype, arg2=jax.dtypes.prng_key)
    return jax.tree.map(
        lambda x: jax.random.key_data(x) if is_key(x.dtype) else x, state
    )


@pytest.mark.parametrize(
    ("schedule", "virtual_stages"), [("1f1b", 1), ("1f1b", 2), ("gpipe", 2)]
)
def test_state_that_layers_read_is_that_of_their_microbatch(schedule, virtual_stages):
    want = trained(1)
    got = trained(2, schedule, virtual_stages)
    assert worst(got, want) < CLOSE
    # The gain and the keys are another in each microbatch: of the first one alone, the
    # losses differ by far more.
    gain, shift = (x for x in want[1] if x.dtype == np.float32)
    assert abs(gain - 1) > 0.1 and abs(shift) > 0.01


def test_state_that_depends_on_layers_and_is_read_before_them_is_refused():
    mesh = fsdp.make_mesh(pp=2)
    plan = plan_of(mesh, late=True)
    step = fsdp.make_train_step(
        plan, loss_fn, TX, has_aux=True, num_microbatches=MICROBATCHES
    )
    state = fsdp.abstract_state(plan, TX)
    with pytest.raises(ValueError, match=facts("gain", "pp=1")):
        step.lower(state, batch())
