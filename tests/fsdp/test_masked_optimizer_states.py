"""States of optimizers that leave some parameters out are saved and restored."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx
from helpers.compare import host

import fsdp_jax as fsdp

ADAMW = optax.adamw(1e-2)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.up = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x):
        return x + self.up(self.norm(x))


class Net(nnx.Module):
    def __init__(self, key):
        rngs = nnx.Rngs(key)
        self.layers = nnx.List([Block(rngs) for _ in range(2)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def matrices(params):
    return jax.tree.map(lambda x: x.ndim == 2, params)


def of_two(first, second):
    return optax.multi_transform(
        {True: first, False: second},
        lambda params: jax.tree.map(lambda x: x.ndim == 2, params),
    )


OPTIMIZERS = {
    "masked": lambda: optax.chain(optax.masked(ADAMW, matrices)),
    "two": lambda: of_two(ADAMW, optax.sgd(1e-2, momentum=0.9)),
    "muon": lambda: optax.contrib.muon(1e-2),
    "masked in 8 bits": lambda: fsdp.optim.eight_bit(
        optax.masked(ADAMW, matrices), min_elements=1
    ),
    "two in narrow floats": lambda: fsdp.optim.precision_aware(
        of_two(ADAMW, optax.sgd(1e-2)), {"mu": jnp.bfloat16}
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_goes_on_from_its_state_to_the_bit(tmp_path, name):
    tx, batch = OPTIMIZERS[name](), jnp.ones((8, 16))
    plan = fsdp.fully_shard(Net, fsdp.make_mesh(), units=[Block])
    step = fsdp.make_train_step(plan, lambda model, x: jnp.mean(model(x) ** 2), tx)
    state = fsdp.init_state(plan, tx, fsdp.init_params(plan, jax.random.key(0)))
    state, _ = step(state, batch)
    fsdp.save(tmp_path, state)
    fresh = fsdp.init_state(plan, tx, fsdp.init_params(plan, jax.random.key(1)))
    loaded = fsdp.load(tmp_path, fresh)
    states = [step(each, batch)[0] for each in (state, loaded)]
    kept = [host((state.params, state.opt_state)) for state in states]
    jax.tree.map(np.testing.assert_array_equal, *kept)
