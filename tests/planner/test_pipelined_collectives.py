"""Compiled for GPUs, XLA's own pipelining moves the first gather before the loop."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fsdp_jax as fsdp
from fsdp_jax.planner._compile import gpu_devices
from fsdp_jax.planner._gpu import find_gpu
from fsdp_jax.training._compiler_options import pipelining_modes

pytestmark = pytest.mark.plan

GATHER = re.compile(r" all-gather(?:-start)?\(")
MODES = pipelining_modes()


def make_weights(key):
    return {"layers": {"w": jnp.ones((8, 512, 512)), "v": jnp.ones((8, 512, 512))}}


def loss_fn(weights, x):
    def layer(w, x):
        return jnp.tanh(jnp.tanh(x @ w["w"]) @ w["v"]), None

    x, _ = fsdp.scan(layer, weights["layers"], x)
    return (x**2).mean()


@pytest.fixture(scope="module")
def steps():
    """Lowered steps by the number of units ahead."""
    mesh = fsdp.make_mesh(devices=gpu_devices(find_gpu("h200"), 8))
    tx, batch = optax.sgd(0.1), np.zeros((1024, 512), np.float32)

    def lowered(prefetch):
        config = fsdp.FSDPConfig(
            prefetch=prefetch, remat_policy=jax.checkpoint_policies.nothing_saveable
        )
        units = [fsdp.Stacked("layers")]
        plan = fsdp.fully_shard(make_weights, mesh, units, config=config)
        step = fsdp.make_train_step(plan, loss_fn, tx)
        return step.lower(fsdp.abstract_state(plan, tx), batch)

    return {prefetch: lowered(prefetch) for prefetch in (0, 1)}


def gathers(step, **options):
    """Gathers in the loops of a compiled step, and those before and after."""
    options = fsdp.training.compiler_options(**options)
    text = step.compile(compiler_options=options).as_text()
    body, entry = text.split("\nENTRY ")
    return len(GATHER.findall(body)), len(GATHER.findall(entry))


@pytest.mark.parametrize("pipelining", MODES)
def test_xla_gathers_before_the_loop_if_it_may_and_units_are_not_ahead(
    steps, pipelining
):
    in_loops, outside = gathers(steps[0])
    pipelined = gathers(steps[0], pipelining=pipelining)
    # One gather of the first iteration, for the loops of forward or of backward.
    assert pipelined[0] == in_loops and pipelined[1] == outside + 1
    # What units ahead have moved already it leaves in place.
    assert gathers(steps[1], pipelining=pipelining) == gathers(steps[1])


def test_gathers_and_reductions_of_units_are_marked(steps):
    lines = steps[0].as_text().splitlines()
    marked = [line for line in lines if "is_pipelineable" in line]
    assert len(marked) >= 4
