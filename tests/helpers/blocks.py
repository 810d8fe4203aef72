"""Blocks of a residual network, for models whose units they are."""

from __future__ import annotations

import equinox as eqx
import jax
from flax import nnx

WIDTH = 8


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 16, rngs=rngs)
        self.down = nnx.Linear(16, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jax.nn.relu(self.up(x)))


class EqxBlock(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        self.up = eqx.nn.Linear(WIDTH, 16, key=key)
        self.down = eqx.nn.Linear(16, WIDTH, key=key)

    def __call__(self, x):
        return x + jax.vmap(self.down)(jax.nn.relu(jax.vmap(self.up)(x)))
