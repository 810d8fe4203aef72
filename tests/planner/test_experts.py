"""Experts in compiled steps: tokens are sent over `ep`, and no weight does."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import pytest
from helpers.experts import (
    CHOSEN,
    EMBED,
    EXPERTS,
    LAYERS,
    ROWS,
    SEQ,
    TX,
    batch,
    loss_of,
    plan_of,
)
from jax import lax

import fsdp_jax as fsdp
from fsdp_jax import ops
from fsdp_jax.hlo._collectives import collective_of
from fsdp_jax.hlo._program import communicated_arrays, program_of
from fsdp_jax.planner._compile import gpu_devices
from fsdp_jax.planner._gpu import GPUS
from fsdp_jax.planner._interconnect import communicated_bytes

EP, RANKS = 4, 8
TOKENS = ROWS // RANKS * SEQ
BF16 = fsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16, grad_comm_dtype=jnp.bfloat16)
CAPACITY = functools.partial(ops.expert_capacity_dispatch, capacity_factor=1.0)
PLACES = math.ceil(TOKENS * CHOSEN / EXPERTS) * EXPERTS
DISPATCHES = {"dropless": ops.expert_parallel_dispatch, "capacity": CAPACITY}
PACKED = 32  # bytes of a token in float8: 16 and a scale, in steps of 16


def lowered(plan, loss=None, dispatch=ops.expert_parallel_dispatch):
    loss = loss or loss_of(dispatch, prefetch=1)
    step = fsdp.make_train_step(plan, loss, TX, has_aux=True)
    rows = {
        name: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=plan.batch_sharding)
        for name, x in batch().items()
    }
    return step.jitted.lower(fsdp.abstract_state(plan, TX), rows)


def in_float8(name):
    return functools.partial(DISPATCHES[name], dispatch_dtype=jnp.float8_e4m3fn)


def check(plan, program, sides, *, float8=False):
    """No weight is sent over ep; tokens are, there and back, forward and backward."""
    arrays = list(communicated_arrays(program_of(program, plan.mesh), plan.mesh))
    experts = {param.name: param for param in plan.param_plans if param.is_expert}
    own = {
        param.split.on_device(plan.mesh, param.shape, ())[param.num_stacked :]
        for param in experts.values()
    }
    gathered = [one for one in arrays if one.op == "all-gather" and "ep" in one.axes]
    assert not {tuple(sorted(o.received)) for o in gathered} & {
        tuple(sorted(dims)) for dims in own
    }
    over_ep = [one for one in arrays if one.axes == ("ep",) and one.dtype != "s32"]
    assert {one.op for one in over_ep} == {sides[0]}
    tokens = [one for one in over_ep if one.dtype == "bf16"]
    rows = [math.prod(one.sent) // EMBED for one in tokens]
    assert sorted(set(rows)) == sorted(set(sides[1:]))
    # Two ways, forward and backward, each layer once; those to experts in float8.
    narrow = [one for one in over_ep if one.dtype == "u8"]
    assert {math.prod(one.sent) // PACKED for one in narrow} <= set(rows)
    assert sum(one.times for one in narrow) == (2 * LAYERS if float8 else 0)
    assert sum(one.times for one in tokens + narrow) == 4 * LAYERS
    # One number of each choice in backward: its weight there, and its gradient back.
    numbers = [one for one in over_ep if one.dtype == "f32"]
    assert len(tokens) + len(narrow) + len(numbers) == len(over_ep)
    assert {math.prod(one.sent) for one in numbers} == set(rows)
    assert sum(one.times for one in numbers) == 2 * LAYERS


@pytest.mark.parametrize("float8", [False, True])
@pytest.mark.parametrize("name", DISPATCHES)
def test_the_lowered_step_sends_tokens_and_no_experts(name, float8):
    plan = plan_of(fsdp.make_mesh(ep=EP), mp_policy=BF16)
    dispatch = in_float8(name) if float8 else DISPATCHES[name]
    program = lowered(plan, dispatch=dispatch)
    fsdp.audit_step(plan, program)
    # For CPUs each pair of ranks has room for all tokens' choices of two experts.
    room = EP * TOKENS * min(CHOSEN, EXPERTS // EP)
    sides = "all-to-all", room if name == "dropless" else PLACES
    check(plan, program, sides, float8=float8)


@pytest.mark.plan
@pytest.mark.parametrize("name", DISPATCHES)
def test_the_step_for_gpus_sends_the_rows_that_there_are(name):
    devices = gpu_devices(GPUS["h200"], RANKS)
    plan = plan_of(fsdp.make_mesh(ep=EP, devices=devices), mp_policy=BF16)
    program = lowered(plan, dispatch=DISPATCHES[name])
    compiled = program.compile(compiler_options=fsdp.training.compiler_options())
    fsdp.audit_step(plan, compiled)
    room = EP * TOKENS * min(CHOSEN, EXPERTS // EP)
    ragged = ("ragged-all-to-all", TOKENS * CHOSEN, room)
    check(plan, compiled, ragged if name == "dropless" else ("all-to-all", PLACES))
    if name == "dropless":
        # What is communicated is the tokens' choices, and not the room for them.
        module = program_of(compiled, plan.mesh).module
        sent = {
            communicated_bytes(found, RANKS)
            for one in communicated_arrays(program_of(compiled, plan.mesh), plan.mesh)
            if (found := collective_of(module, one.computation, one.instruction))
            and found.op == "ragged-all-to-all"
        }
        away = TOKENS * CHOSEN * (EP - 1) / EP
        assert sent == {away * EMBED * 2, away * 4}
        assert copied_targets(module) == []


def copied_targets(module):
    """Copies of zeros that rows are received in: a fill moves half the bytes."""
    return [
        source.name
        for computation in module.computations.values()
        for one in computation.instructions
        if one.opcode == "ragged-all-to-all-start"
        and (source := computation.by_name[one.operands[1]]).opcode == "copy"
    ]


@pytest.mark.plan
@pytest.mark.parametrize("name", DISPATCHES)
def test_the_step_for_gpus_sends_bytes_to_the_experts_and_is_priced_by_them(name):
    devices = gpu_devices(GPUS["h200"], RANKS)
    plan = plan_of(fsdp.make_mesh(ep=EP, devices=devices), mp_policy=BF16)
    program = lowered(plan, dispatch=in_float8(name))
    compiled = program.compile(compiler_options=fsdp.training.compiler_options())
    fsdp.audit_step(plan, compiled)
    module = program_of(compiled, plan.mesh).module
    over_ep = [
        (one.dtype, communicated_bytes(found, RANKS))
        for one in communicated_arrays(program_of(compiled, plan.mesh), plan.mesh)
        if (found := collective_of(module, one.computation, one.instruction))
        and "all-to-all" in found.op
    ]
    rows = (TOKENS * CHOSEN if name == "dropless" else PLACES) * (EP - 1) / EP
    assert set(over_ep) == {
        ("u8", rows * PACKED),
        ("bf16", rows * EMBED * 2),
        ("f32", rows * 4),
    }


def test_experts_that_are_brought_together_are_named():
    def gathered(run, x, experts, weights, num_experts):
        # As if all experts had to be here: what expert parallelism is to avoid.
        gather = functools.partial(lax.all_gather, axis_name="ep", tiled=True)
        whole = functools.partial(run.func, jax.tree.map(gather, run.args[0]))
        return ops.expert_parallel_dispatch(
            whole, x, experts, weights, num_experts, axis="cp"
        )

    plan = plan_of(fsdp.make_mesh(ep=EP), mp_policy=BF16)
    with pytest.raises(fsdp.audit.AuditError) as error:
        fsdp.audit_step(plan, lowered(plan, loss_of(gathered)))
    named = [line for line in error.value.differences if "experts of all ranks" in line]
    assert any("'layers.experts.up'" in line for line in named)
