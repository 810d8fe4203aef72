"""Compiled steps that send one copy of a token to each node: audited, and priced."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from helpers.experts import EMBED, LAYERS, ROWS, SEQ, TX, batch, loss_of, plan_of

import fsdp_jax as fsdp
from fsdp_jax import ops
from fsdp_jax.hlo._program import communicated_arrays, program_of
from fsdp_jax.planner._compile import gpu_devices
from fsdp_jax.planner._gpu import GPUS

BF16 = fsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16, grad_comm_dtype=jnp.bfloat16)
RANKS, EP, IN_NODE, LIMIT = 8, 4, 2, 1
TOKENS = ROWS // RANKS * SEQ
BY_NODE = functools.partial(
    ops.expert_capacity_dispatch,
    capacity_factor=1.0,
    ranks_per_node=IN_NODE,
    nodes_per_token=LIMIT,
)


def lowered(plan):
    step = fsdp.make_train_step(plan, loss_of(BY_NODE, prefetch=1), TX, has_aux=True)
    rows = {
        name: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=plan.batch_sharding)
        for name, x in batch().items()
    }
    return step.jitted.lower(fsdp.abstract_state(plan, TX), rows)


def test_the_audit_knows_tokens_sent_within_nodes_and_between():
    plan = plan_of(fsdp.make_mesh(ep=EP), mp_policy=BF16)
    fsdp.audit_step(plan, lowered(plan))


@pytest.mark.plan
def test_the_step_for_gpus_sends_a_token_once_a_node():
    devices = gpu_devices(GPUS["h200"], RANKS)
    plan = plan_of(fsdp.make_mesh(ep=EP, devices=devices), mp_policy=BF16)
    compiled = lowered(plan).compile(compiler_options=fsdp.training.compiler_options())
    fsdp.audit_step(plan, compiled)
    arrays = list(communicated_arrays(program_of(compiled, plan.mesh), plan.mesh))
    between = [one for one in arrays if one.op == "ragged-all-to-all"]
    assert {one.axes for one in between} == {("ep",)}
    # There and back, forward and backward, each layer once.
    assert sum(one.times for one in between) == 4 * LAYERS
    rows = {one.sent[0] for one in between if one.sent[-1] == EMBED}
    assert min(rows) == TOKENS * LIMIT
