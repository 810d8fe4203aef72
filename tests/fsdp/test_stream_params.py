"""Weights streamed from the host: the same numbers, and what cannot be streamed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.compare import host
from helpers.errors import facts

import fsdp_jax as fsdp

TX = optax.adamw(1e-2)
LAYERS, EMBED, MLP, ROWS = 4, 16, 32, 16
WHOLE = fsdp.OffloadPolicy(params=True, min_elements=100)
STREAM = fsdp.OffloadPolicy(params=True, min_elements=100, stream_params=True)
BF16 = fsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16)


def make_weights(key):
    up, down, head = jax.random.split(key, 3)
    return {
        "layers": {
            "up": 0.3 * jax.random.normal(up, (LAYERS, EMBED, MLP)),
            "down": 0.3 * jax.random.normal(down, (LAYERS, MLP, EMBED)),
            "norm": jnp.ones((LAYERS, EMBED)),
        },
        "head": 0.3 * jax.random.normal(head, (EMBED, 8)),
    }


def layer(w, x):
    return x + jnp.tanh((x * w["norm"][None]) @ w["up"]) @ w["down"], None


def loss_fn(weights, batch, **options):
    x = batch["x"].astype(weights["head"].dtype)
    x, _ = fsdp.scan(layer, weights["layers"], x, **options)
    return jnp.mean((x @ weights["head"] - batch["y"]).astype(jnp.float32) ** 2)


def asked_of_the_scan(weights, batch):
    return loss_fn(weights, batch, prefetch=2)


def gathered_when_it_begins(weights, batch):
    return loss_fn(weights, batch, prefetch=0)


def scanned_by_jax(weights, batch):
    x, _ = jax.lax.scan(
        lambda x, w: fsdp.unit(layer)(w, x), batch["x"], weights["layers"]
    )
    return jnp.mean((x @ weights["head"] - batch["y"]) ** 2)


def rows():
    random = np.random.default_rng(0)
    shapes = {"x": (ROWS, EMBED), "y": (ROWS, 8)}
    return {k: random.normal(size=s).astype(np.float32) for k, s in shapes.items()}


def plan_of(offload, devices=8, units=(fsdp.Stacked("layers"),), **config):
    config = {"mp_policy": BF16} | config
    mesh = fsdp.make_mesh(devices=jax.devices()[:devices])
    return fsdp.fully_shard(
        make_weights, mesh, units, fsdp.FSDPConfig(offload=offload, **config)
    )


def trained(plan, loss, **options):
    step = fsdp.make_train_step(plan, loss, TX, **options)
    state = fsdp.init_state(plan, TX, fsdp.init_params(plan, jax.random.key(0)))
    for _ in range(2):
        state, metrics = step(state, rows())
    return host(state.params), host(state.opt_state), host(metrics)


CASES = {
    "bfloat16": ({}, loss_fn, {}),
    "the scan asks for two ahead": ({}, asked_of_the_scan, {}),
    "jax.lax.scan, float32": (
        {"mp_policy": fsdp.MixedPrecisionPolicy()},
        scanned_by_jax,
        {},
    ),
    "microbatches": ({}, loss_fn, {"num_microbatches": 2}),
    "one device": ({"devices": 1}, loss_fn, {}),
    "frozen layers": ({"frozen": ("layers.*",)}, loss_fn, {}),
    "LoRA": ({"lora": fsdp.LoRAConfig(rank=2, targets=("layers.up",))}, loss_fn, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_steps_are_the_same_to_the_bit(case):
    config, loss, options = CASES[case]
    want, got = (
        trained(plan_of(offload, **config), loss, **options)
        for offload in (WHOLE, STREAM)
    )
    jax.tree.map(np.testing.assert_array_equal, got, want)
