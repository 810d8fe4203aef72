"""Every strategy computes what one device computes, with the collectives it names."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
from helpers.compare import host, worst
from helpers.hlo import collectives, group_size, loops_around_loops
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


def trained(plan, accumulate):
    """(parameters, loss) of three steps in float64."""
    with jax.enable_x64(True):
        step = fsdp.make_train_step(plan, CASE.loss, TX, accumulate=accumulate)
        state = fsdp.init(plan, TX, CASE.sharded(plan, np.float64))
        for _ in range(3):
            state, metrics = step(state, batch(np.float64, rows=24))
        return host(state.params), float(metrics["loss"])


@pytest.fixture(scope="module")
def one_device():
    with jax.enable_x64(True):
        plan = CASE.plan(fsdp.make_mesh(devices=jax.devices()[:1]), np.float64)
    return trained(plan, 1)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parameters_equal_those_of_one_device(strategy, accumulate, one_device):
    with jax.enable_x64(True):
        plan = plan_of(strategy, np.float64)
    params, loss = trained(plan, accumulate)
    want, want_loss = one_device
    assert worst(params, want, without=CASE.zero_grads) < 1e-9
    assert abs(loss - want_loss) < 1e-9


@pytest.mark.parametrize("strategy", ["DDP", "HSDP", "HFSDP"])
def test_without_overlap_the_numbers_are_the_same(strategy, one_device):
    with jax.enable_x64(True):
        plan = plan_of(strategy, np.float64, overlap_outer=False)
    params, _ = trained(plan, 3)
    assert worst(params, one_device[0], without=CASE.zero_grads) < 1e-9


def counted(plan, accumulate):
    """{(op, devices, where): operands}, where `where` is one of

    - "microbatches": anywhere in the loop over microbatches,
    - "layers": in a loop over layers outside of that, the last microbatch's,
    - "once": in no loop.
    """
    step = fsdp.make_train_step(plan, CASE.loss, TX, accumulate=accumulate)
    lowered = step.lower(fsdp.abstract_state(plan, TX), batch(rows=24))
    text = lowered.compile().as_text()
    over_microbatches = loops_around_loops(text)
    counts: dict[tuple[str, int, str], int] = {}
    for c in collectives(text):
        if c.op == "all-reduce" and c.size == 1:  # The loss, and the gradient's norm.
            continue
        looped = over_microbatches & set(c.loops)
        where = "microbatches" if looped else "layers" if c.loops else "once"
        key = (c.op, group_size(c.groups), where)
        counts[key] = counts.get(key, 0) + 1
    return counts


@pytest.fixture(scope="module", params=STRATEGIES)
def case(request):
    plan = plan_of(request.param)
    return request.param, plan, counted(plan, 3)


@pytest.fixture(scope="module", params=STRATEGIES)
def case_at_the_end(request):
    plan = plan_of(request.param, overlap_outer=False)
    return request.param, plan, counted(plan, 3)


def test_collectives_are_those_that_the_strategy_names(case):
    strategy, plan, found = case
    inner, outer, dp_outer = STRATEGIES[strategy]
    shards, n = 8 // dp_outer, len(plan.rows)
    root = sum(row.unit == ROOT for row in plan.rows)
    late: list[tuple[str, int]] = []  # Reduced once a step, in the last backward.
    expected = {}
    if inner == 0:
        late.append(("all-reduce", 8))
    if inner in (1, 2):  # Gathered when the step begins, once.
        expected[("all-gather", shards, "once")] = n
    if inner == 1:
        late.append(("reduce-scatter", shards))
    if inner >= 1 and dp_outer > 1:
        late.append(("reduce-scatter" if outer else "all-reduce", 2))
    if outer:
        expected[("all-gather", 2, "once")] = n
    for op, devices in late:
        expected[(op, devices, "layers")] = n - root
        expected[(op, devices, "once")] = root
    if inner >= 2:  # Reduced to shards each microbatch, the last one outside the loop.
        expected[("reduce-scatter", shards, "microbatches")] = n
        if late:
            expected[("reduce-scatter", shards, "layers")] = n - root
            expected[("reduce-scatter", shards, "once")] = root
    gathers = {
        where: found.pop(("all-gather", shards, where), 0)
        for where in (("microbatches", "layers", "once") if inner == 3 else ())
    }
    assert found == expected
    # Forward and backward; what no gradient needs is not gathered again, and what
    # belongs to no unit may be gathered before the loop.
    if inner == 3:
        assert n - root < gathers["microbatches"] <= 2 * n
        assert gathers["once"] <= 2 * root
        assert n - root < gathers["layers"] <= 2 * n if late else not gathers["layers"]


def test_without_overlap_the_reductions_come_after_one_loop(case_at_the_end):
    strategy, plan, found = case_at_the_end
    inner, outer, dp_outer = STRATEGIES[strategy]
    shards, n = 8 // dp_outer, len(plan.rows)
    assert not any(where == "layers" for _, _, where in found)
    at_the_end = {
        (op, devices): count
        for (op, devices, where), count in found.items()
        if where == "once" and op != "all-gather"
    }
    expected = {}
    if inner == 0:
        expected[("all-reduce", 8)] = n
    if inner == 1:
        expected[("reduce-scatter", shards)] = n
    if inner >= 1 and dp_outer > 1:
        expected[("reduce-scatter" if outer else "all-reduce", 2)] = n
    assert at_the_end == expected


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
