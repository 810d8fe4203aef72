"""Compiled for GPUs, an option of XLA puts what is communicated into NCCL's memory."""

from __future__ import annotations

import re

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fsdp_jax as fsdp
from fsdp_jax.planner._compile import gpu_devices
from fsdp_jax.planner._gpu import find_gpu

pytestmark = pytest.mark.plan

# XLA's memory space of buffers that NCCL registers; 7 from jaxlib 0.12 on.
IN_NCCL = re.compile(r":S\([17]\)")
STARTS = re.compile(r"= .* (?:all-gather|reduce-scatter)-start\(")


def make_weights(key):
    return {"layers": {"w": jnp.ones((4, 512, 512))}}


def loss_fn(weights, x):
    def layer(w, x):
        return jnp.tanh(x @ w["w"]), None

    x, _ = fsdp.scan(layer, weights["layers"], x)
    return (x**2).mean()


@pytest.fixture(scope="module")
def lowered():
    mesh = fsdp.make_mesh(devices=gpu_devices(find_gpu("h100"), 8))
    plan = fsdp.fully_shard(make_weights, mesh, [fsdp.Stacked("layers")])
    tx = optax.sgd(0.1)
    step = fsdp.make_train_step(plan, loss_fn, tx)
    batch = np.zeros((64, 512), np.float32)
    found = step.lower(fsdp.abstract_state(plan, tx), batch)
    return plan, found, found.compile()


@pytest.mark.parametrize(
    "option",
    [
        "xla_gpu_enable_nccl_user_buffers",
        "xla_gpu_experimental_enable_nccl_symmetric_buffers",
    ],
)
def test_an_option_moves_every_gather_and_reduction_and_changes_nothing_else(
    lowered, option
):
    plan, step, plain = lowered
    moved = step.compile(compiler_options={option: True})
    starts = [line for line in moved.as_text().splitlines() if STARTS.search(line)]
    assert len(starts) >= 4
    for line in starts:  # operand and result
        assert len(IN_NCCL.findall(line.split("-start(")[0])) == 2, line
    assert not IN_NCCL.search(plain.as_text())
    assert _program(moved) == _program(plain)
    fsdp.audit_step(plan, moved)


def _program(compiled) -> str:
    """Its text without memory spaces, and without the options it was compiled with."""
    text = IN_NCCL.sub("", compiled.as_text())
    return re.sub(r"fingerprint_before_lhs=\S+|\"[0-9a-f]{32}\"", "", text)
