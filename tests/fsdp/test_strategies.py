"""Every strategy computes what one device computes, with the collectives it names."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
from helpers.compare import host, worst
from helpers.hlo import collectives, group_size
from helpers.zoo import CASES, batch

import fsdp_jax as fsdp
from fsdp_jax._plan import ROOT

CASE = CASES["nnx scanned"]
TX = optax.adamw(1e-2, eps=1e-8)
STRATEGIES = {
    "DDP": (0, 0, 1),
    "ZeRO-1": (1, 0, 1),
    "ZeRO-2": (2, 0, 1),
    "ZeRO-3": (3, 0, 1),
    "DDP x 2": (0, 0, 2),
    "ZeRO-1 x 2": (1, 0, 2),
    "ZeRO-2 x 2": (2, 0, 2),
    "HSDP": (3, 0, 2),
    "HFSDP": (3, 1, 2),
}


def plan_of(strategy, dtype=np.float32, **config):
    inner, outer, dp_outer = STRATEGIES[strategy]
    return CASE.plan(
        fsdp.make_mesh(dp_outer=dp_outer),
        dtype,
        zero_dp_strategy=inner,
        outer_dp_sharding_strategy=outer,
        **config,
    )


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parameters_equal_those_of_one_device(strategy, accumulate):
    with jax.enable_x64(True):
        data = batch(np.float64, rows=24)
        mesh_of_one = fsdp.make_mesh(devices=jax.devices()[:1])
        results = []
        for plan, k in (
            (plan_of(strategy, np.float64), accumulate),
            (CASE.plan(mesh_of_one, np.float64), 1),
        ):
            step = fsdp.make_train_step(plan, CASE.loss, TX, accumulate=k)
            state = fsdp.init(plan, TX, CASE.sharded(plan, np.float64))
            for _ in range(3):
                state, metrics = step(state, data)
            results.append((host(state.params), float(metrics["loss"])))
    (params, loss), (want, want_loss) = results
    assert worst(params, want, without=CASE.zero_grads) < 1e-9
    assert abs(loss - want_loss) < 1e-9


def counted(plan, accumulate):
    """{(op, devices, in the loop over microbatches): operands}, and all operands."""
    step = fsdp.make_train_step(plan, CASE.loss, TX, accumulate=accumulate)
    lowered = step.lower(fsdp.abstract_state(plan, TX), batch(rows=24))
    found = [
        c
        for c in collectives(lowered.compile().as_text())
        if c.op != "all-reduce" or c.size > 1  # The loss, and the gradient's norm.
    ]
    counts: dict[tuple[str, int, bool], int] = {}
    for c in found:
        key = (c.op, group_size(c.groups), c.depth > 0)
        counts[key] = counts.get(key, 0) + 1
    return counts


@pytest.fixture(scope="module", params=STRATEGIES)
def counts(request):
    plan = plan_of(request.param)
    return request.param, len(plan.rows), counted(plan, 3)


def test_collectives_are_those_that_the_strategy_names(counts):
    strategy, n, found = counts
    inner, outer, dp_outer = STRATEGIES[strategy]
    shards = 8 // dp_outer
    expected = {}
    if inner == 0:
        expected[("all-reduce", 8, False)] = n
    if inner in (1, 2):  # Gathered when the step begins, once.
        expected[("all-gather", shards, False)] = n
    if inner >= 1:  # Reduced to shards: once a step, or each microbatch.
        expected[("reduce-scatter", shards, inner >= 2)] = n
    if inner >= 1 and dp_outer > 1 and not outer:
        expected[("all-reduce", 2, False)] = n
    if outer:
        expected[("all-gather", 2, False)] = n
        expected[("reduce-scatter", 2, False)] = n
    gathered = found.pop(("all-gather", shards, True), 0)
    if inner == 3:  # What belongs to no unit may be gathered before the loop.
        gathered += found.pop(("all-gather", shards, False), 0)
    assert found == expected
    # Forward and backward; what no gradient needs is not gathered again.
    assert n < gathered <= 2 * n if inner == 3 else gathered == 0


def test_units_are_gathered_within_the_microbatch_also_when_unrolled():
    case = CASES["nnx unrolled"]
    plan = case.plan(fsdp.make_mesh())
    step = fsdp.make_train_step(plan, case.loss, TX, accumulate=3)
    lowered = step.lower(fsdp.abstract_state(plan, TX), batch(rows=24))
    found = collectives(lowered.compile().as_text())
    before = [c for c in found if c.op == "all-gather" and c.depth == 0]
    root = [row for row in plan.rows if row.unit == ROOT]
    assert len(before) <= len(root)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bytes_on_a_device_follow_from_the_strategy(strategy):
    plan = plan_of(strategy)
    inner, outer, dp_outer = STRATEGIES[strategy]
    pieces = (8 // dp_outer if inner else 1) * (dp_outer if outer else 1)
    state = fsdp.init(plan, TX, CASE.sharded(plan))
    elements = sum(np.prod(row.shape) for row in plan.rows)
    held = sum(
        leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state.params)
    )
    assert held == plan.bytes_per_device["params"] == 4 * elements // pieces
    moments = sum(
        leaf.addressable_shards[0].data.nbytes
        for leaf in jax.tree.leaves(state.opt_state)
    )
    assert moments == 2 * held + 4  # and Adam's step counter


@pytest.mark.parametrize(
    "config, message",
    [
        ({"zero_dp_strategy": 4}, "0 or 'no_shard'"),
        ({"zero_dp_strategy": "zero3"}, "3 or 'optim_grads_params'"),
        ({"outer_dp_sharding_strategy": 2}, "1 or 'optim'"),
        ({"zero_dp_strategy": 2, "outer_dp_sharding_strategy": 1}, "Use strategy 3"),
    ],
)
def test_strategies_that_do_not_exist_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        fsdp.FSDPConfig(**config)
