"""Compiled for GPUs, streamed weights are in host memory but for units that run."""

from __future__ import annotations

import functools
import re

import jax
import optax
import pytest
from helpers.llama import Llama, tokens

import fsdp_jax as fsdp
from fsdp_jax.planner._memory import WORKSPACE

pytestmark = pytest.mark.plan

LAYERS, AHEAD = 12, 1
MODEL = Llama(layers=LAYERS, width=1024, mlp=2816, heads=8, kv_heads=4, vocab=4000)
WHOLE = fsdp.OffloadPolicy(params=True)
STREAM = fsdp.OffloadPolicy(params=True, stream_params=True)
# So that weights and not their gradients and moments are what has to fit.
FROZEN = ("layers.*", "head")


@pytest.fixture(autouse=True, scope="module")
def all_optimizations():
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@functools.cache
def estimate(offload, gpus, frozen=FROZEN):
    mesh = fsdp.make_mesh(devices=jax.devices()[:1])
    plan = MODEL.plan(mesh, offload=offload, frozen=frozen)
    options = {"gpus": gpus, "guide": False}
    tx, batch = optax.adamw(1e-3), tokens(8, 128)
    return fsdp.estimate_step(plan, MODEL.loss(), tx, batch, **options)


def layers_bytes(found, layers):
    """Bytes of so many layers' weights on one GPU, in bfloat16."""
    return (
        sum(
            param.num_elements(found.plan.mesh, param.placements.optimizer)
            * 2
            // LAYERS
            for param in found.plan.param_plans
            if param.unit == "layers"
        )
        * layers
    )


@pytest.mark.parametrize("gpus", [pytest.param(1, marks=pytest.mark.long), 4])
def test_memory_falls_by_all_layers_but_those_that_run_and_are_copied(gpus):
    whole, found = (estimate(offload, gpus) for offload in (WHOLE, STREAM))
    fell = whole.compiled_bytes - found.compiled_bytes
    assert fell >= layers_bytes(found, LAYERS - (AHEAD + 1))
    # Nothing may be above a prediction, and the stacks are not in it.
    assert found.compiled_bytes <= found.memory.total
    said = whole.memory.total - found.memory.total
    assert said >= layers_bytes(found, LAYERS - (AHEAD + 1))
    stats = found.compiled.memory_analysis()
    assert stats.host_temp_size_in_bytes == 0
    assert stats.host_argument_size_in_bytes == found.offloaded.bytes
    fsdp.audit_step(found.plan, found.compiled)
    # Forward and backward, in the place of once when the step begins.
    more = found.offloaded.fetched - whole.offloaded.fetched
    assert more >= layers_bytes(found, LAYERS)


def test_each_iteration_copies_a_slice_while_it_computes():
    text = estimate(STREAM, 4).compiled.as_text()
    # Each begins with `-start`: an asynchronous copy out of memory space 5, the host's.
    sliced = rf"bf16\[{LAYERS},\d+,\d+\]{{2,1,0:S\(5\)}}"
    begun = re.findall(rf"dynamic-slice-start\S* = \(\({sliced}", text)
    # Of 8 arrays: before the loops, in that of forward and in that of backward.
    assert len(begun) == 3 * 8
    assert not re.search(rf"\[{LAYERS},\d+,\d+\]{{2,1,0}} copy-(start|done)", text)
    # The copies of stacks as a whole, which are there without streaming.
    plain = estimate(WHOLE, 4).compiled.as_text()
    assert re.search(rf"\[{LAYERS},\d+,\d+\]{{2,1,0}} copy-(start|done)", plain)


def test_stacks_are_updated_a_layer_at_a_time_in_their_place_on_the_host():
    found = estimate(STREAM, 4, frozen=())
    stats = found.compiled.memory_analysis()
    # New stacks beside the old ones would be in host memory too.
    assert stats.host_temp_size_in_bytes == 0
    assert stats.host_alias_size_in_bytes == stats.host_argument_size_in_bytes
    # At most what `test_offload.py` allows, and never below.
    assert found.compiled_bytes <= found.memory.total <= 1.13 * found.compiled_bytes
    # No stack of weights or moments is copied as a whole.
    stack = rf"\[{LAYERS},\d+,\d+\]{{2,1,0}} copy-(start|done)"
    assert not re.search(stack, found.compiled.as_text())
    fsdp.audit_step(found.plan, found.compiled)


@pytest.mark.long
def test_training_all_layers_takes_less_memory_by_their_weights_and_moments():
    whole, found = (estimate(offload, 4, frozen=()) for offload in (WHOLE, STREAM))
    # Two parameters of a stack at a time, with two moments each, and one that returns.
    fell = whole.compiled_bytes - found.compiled_bytes
    assert fell >= 0.4 * whole.compiled_bytes
    assert whole.compiled_bytes <= whole.memory.total <= 1.13 * whole.compiled_bytes
    assert whole.memory.other > 2 * WORKSPACE
