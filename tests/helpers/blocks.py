"""Blocks of a residual network, for models whose units they are."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from flax import nnx

import fsdp_jax as fsdp

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


UNIT = fsdp.unit(lambda w, x: x + jnp.tanh(x @ w["up"]) @ w["down"])


def make_list(key, width=WIDTH, units=4):
    shapes = {"up": (width, 2 * width), "down": (2 * width, width)}
    keys = jax.random.split(key, units)
    layers = [
        {n: jax.random.normal(k, dims) / width for n, dims in shapes.items()}
        for k in keys
    ]
    return {"layers": layers}


def through_modules(model, x):
    for layer in model.layers:
        x = layer(x)
    return x


def through_list(params, x):
    for weights in params["layers"]:
        x = UNIT(weights, x)
    return x
