"""A step says before it runs that it hardly fits, once."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.compiles import compilations
from helpers.errors import facts

import fsdp_jax as fsdp
from fsdp_jax.training._memory_check import compiled_bytes, num_rematerialized

pytestmark = pytest.mark.versions

TX = optax.sgd(0.1)
BATCH = np.ones((16, 64), np.float32)


@pytest.fixture(scope="module")
def plan():
    return fsdp.fully_shard(lambda key: {"w": jnp.ones((64, 64))}, fsdp.make_mesh())


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2)


def first_step(plan, limit):
    """What two steps warn of, and how often they compiled."""
    step = fsdp.make_train_step(plan, loss_fn, TX, memory_limit=limit)
    state = fsdp.init_state(plan, TX, fsdp.init_params(plan, jax.random.key(0)))
    batch = jax.device_put(BATCH, plan.batch_sharding)
    with warnings.catch_warnings(record=True) as caught, compilations() as heard:
        warnings.simplefilter("always")
        for _ in range(2):
            state, _ = step(state, batch)
        compiled = sum("backend_compile" in event for event in heard)
    return step, caught, compiled


def test_a_step_within_5_percent_of_the_memory_warns_once_and_compiles_once(plan):
    step, caught, compiled = first_step(plan, 10**9)
    assert not caught and compiled == 1
    like = fsdp.abstract_state(plan, TX)
    size = compiled_bytes(step.lower(like, BATCH).compile())
    for limit, is_near in ((int(size / 0.94), False), (int(size / 0.96), True)):
        _, caught, compiled = first_step(plan, limit)
        assert [one.category for one in caught] == [
            fsdp.training.MemoryWarning
        ] * is_near
        assert compiled == 1
    assert "96.0% of the" in str(caught[0].message)
    assert caught[0].filename == __file__  # Of the call of the step.


def test_without_a_limit_nothing_is_looked_at_on_cpus(plan):
    _, caught, _ = first_step(plan, None)
    assert not caught
    with pytest.raises(ValueError, match=facts("memory_limit=0", "1")):
        fsdp.make_train_step(plan, loss_fn, TX, memory_limit=0)


def test_only_copies_that_xla_made_are_counted():
    text = """
  %fusion.9.remat2 = (f32[8]{0}, f32[8]{0}) fusion(%x.1)
  ROOT %dot.24.remat = f32[8]{0} dot(%fusion.9.remat2, %w)
  %a = f32[8]{0} add(%dot.24.remat, %w), metadata={op_name="jit(f)/remat/add"}
  %loop_broadcast_fusion.23.rematerialized = f32[8]{0} fusion(), kind=kLoop
  %rematted_computation.1 = f32[8]{0} add(%a, %w)
"""
    assert num_rematerialized(text) == 2
