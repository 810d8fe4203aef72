"""Experts split over `ep`: they train as on one device, and are never gathered."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.compare import host, worst
from helpers.errors import facts
from helpers.experts import (
    EXPERTS,
    LAYERS,
    RULES,
    TX,
    batch,
    loss_of,
    make_weights,
    plan_of,
)
from jax.sharding import PartitionSpec as P

import fsdp_jax as fsdp
from fsdp_jax import ops


def trained(plan, num_microbatches=1, **options):
    """Parameters, loss and norm of the gradient after three steps."""
    step = fsdp.make_train_step(
        plan, loss_of(**options), TX, num_microbatches=num_microbatches, has_aux=True
    )
    state = fsdp.init_state(plan, TX, fsdp.init_params(plan, jax.random.key(0)))
    metrics = {}
    for _ in range(3):
        state, metrics = step(state, batch())
    numbers = float(metrics["loss"]), float(metrics["grad_norm"])
    return host(fsdp.sharding.unpack(state.params)), *numbers


@pytest.fixture(scope="module")
def one_device():
    with jax.enable_x64(True):
        return trained(plan_of(fsdp.make_mesh(devices=jax.devices()[:1])))


def flat(*axes):
    return fsdp.Placements(axes, axes, axes)


CASES = {
    "ep 8, recomputed": (
        {"ep": 8},
        {"remat_policy": jax.checkpoint_policies.nothing_saveable},
        {"prefetch": 1},
    ),
    "hsdp x ep": ({"dp_outer": 2, "ep": 2}, {}, {"num_microbatches": 2}),
    "hfsdp x ep": (
        {"dp_outer": 2, "ep": 2},
        {"outer_dp_sharding_strategy": 1},
        {"prefetch": 1, "unroll": 2},
    ),
    "ddp 2 x ep 4": ({"ep": 4}, {"zero_dp_strategy": 0}, {}),
    "placements of one's own": (
        {"dp_outer": 2, "ep": 2},
        {"placements": flat("ep", "dp_outer", "dp_shard")},
        {},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_three_steps_are_those_of_one_device(case, one_device):
    sizes, config, options = CASES[case]
    with jax.enable_x64(True):
        params, loss, norm = trained(
            plan_of(fsdp.make_mesh(**sizes), **config), **options
        )
    want, want_loss, want_norm = one_device
    assert worst(params, want) < 1e-9
    assert abs(loss - want_loss) < 1e-9
    assert abs(norm - want_norm) < 1e-9


def test_experts_that_are_frozen_stay_and_the_others_train(one_device):
    with jax.enable_x64(True):
        plan = plan_of(fsdp.make_mesh(ep=4), frozen=("layers.experts",))
        assert [leaf for leaf in jax.tree.leaves(plan.grads["layers"]["experts"])] == []
        params, _, _ = trained(plan)
        start = host(make_weights(jax.random.key(0)))
    experts = params["layers"]["experts"]
    assert worst(experts, start["layers"]["experts"]) < 1e-12
    assert worst(params["head"], start["head"]) > 1e-3


@pytest.fixture(scope="module")
def plan():
    return plan_of(fsdp.make_mesh(dp_outer=2, ep=2))


def test_experts_lie_over_ep_and_on_another_dim_over_the_rest(plan):
    specs = {
        param.name: param.spec(param.placements.optimizer) for param in plan.param_plans
    }
    assert specs["layers.experts.up"] == P(None, "ep", "dp_shard")
    assert specs["layers.experts.gain"] == P(None, "ep", "dp_shard")
    assert specs["layers.norm"] == P(None, ("dp_shard", "ep"))
    assert "dim 2 over dp_shard, dim 1 over ep" in repr(plan)
    assert "experts, never gathered over ep: 4" in repr(plan)


def test_stored_bytes_are_those_of_the_table(plan):
    state = fsdp.init_state(plan, TX, fsdp.init_params(plan, jax.random.key(0)))
    held = [
        param.num_elements(plan.mesh, param.placements.optimizer)
        for param in plan.param_plans
    ]
    leaves = jax.tree.leaves(state.params)
    assert held == [leaf.addressable_shards[0].data.size for leaf in leaves]
    moments = [m for m in jax.tree.leaves(state.opt_state) if m.ndim]
    assert 2 * sum(held) == sum(m.addressable_shards[0].data.size for m in moments)


def test_a_checkpoint_of_experts_loads_on_any_other_layout(plan, tmp_path):
    state = fsdp.init_state(plan, TX, fsdp.init_params(plan, jax.random.key(0)))
    fsdp.save(tmp_path / "run", state)
    want = host(fsdp.sharding.unpack(state.params))
    meshes = (
        fsdp.make_mesh(ep=8),
        fsdp.make_mesh(dp_outer=4),
        fsdp.make_mesh(devices=jax.devices()[:1]),
    )
    for mesh in meshes:
        other = plan_of(mesh)
        loaded = fsdp.load(tmp_path / "run", fsdp.abstract_state(other, TX))
        got = host(fsdp.sharding.unpack(loaded.params))
        jax.tree.map(np.testing.assert_array_equal, got, want)
        shardings = jax.tree.map(
            lambda leaf: leaf.sharding, fsdp.abstract_state(other, TX).params
        )
        assert jax.tree.map(lambda leaf: leaf.sharding, loaded.params) == shardings


def test_without_rules_ep_is_data_parallel_and_the_plan_says_so():
    plan = plan_of(fsdp.make_mesh(ep=2), expert_parallel={})
    assert "ep=2 is as dp_shard here" in repr(plan)
    assert not any(param.is_expert for param in plan.param_plans)


def test_rules_do_nothing_where_ep_is_one():
    plan = plan_of(fsdp.make_mesh(), expert_parallel=RULES)
    assert not any(param.is_expert for param in plan.param_plans)


@pytest.mark.parametrize(
    "config, message",
    [
        ({"expert_parallel": {"layers.expert": 0}}, ["'layers.expert'"]),
        (
            {"expert_parallel": {"layers.experts.up": 3}},
            ["dim 3", "'layers.experts.up'", "3"],
        ),
        (
            {"expert_parallel": {"layers.experts.gain": 1}},
            ["ep=2", "'layers.experts.gain'", "(2, 8, 3)"],
        ),
        (
            {"expert_parallel": RULES, "replicated": ("layers.experts.bias",)},
            ["'layers.experts.bias'", "replicated=..."],
        ),
    ],
)
def test_rules_that_cannot_be_are_refused(config, message):
    with pytest.raises(
        ValueError, match=facts("FSDPConfig(expert_parallel=...)", *message)
    ):
        plan_of(fsdp.make_mesh(ep=2), **config)


def test_all_that_ep_does_not_divide_is_named_at_once():
    with pytest.raises(ValueError) as error:
        plan_of(
            fsdp.make_mesh(ep=8),
            expert_parallel={"layers.experts.up": 2, "layers.experts.gain": 1},
        )
    assert "'layers.experts.gain' (2, 8, 3): dim 2" in str(error.value)
    assert "'layers.experts.up'" not in str(error.value)  # 8 divides 24


def test_a_whole_optimizer_of_factors_is_split_over_ep_too():
    tx = optax.adafactor(1e-2, min_dim_size_to_factor=8)
    plan = plan_of(fsdp.make_mesh(ep=4))
    state = fsdp.init_state(plan, tx, fsdp.init_params(plan, jax.random.key(0)))
    whole = [
        leaf.shape
        for leaf in jax.tree.leaves(state.opt_state)
        if leaf.ndim and leaf.size > 8 and leaf.sharding.is_fully_replicated
    ]
    assert not whole


def test_vectors_of_experts_are_not_stacked_as_matrices():
    plan = plan_of(fsdp.make_mesh(ep=2))
    with pytest.raises(ValueError, match=facts("'layers.experts.bias'")):
        fsdp.optim.layer_wise(plan, TX, TX, ["layers.experts.bias"])


def test_dropped_choices_of_all_ranks_are_reported():
    plan = plan_of(fsdp.make_mesh(ep=4))
    tight = functools.partial(ops.expert_capacity_dispatch, capacity_factor=0.5)
    results = {}
    for name, dispatch in {
        "tight": tight,
        "dropless": ops.expert_parallel_dispatch,
    }.items():
        evaluate = fsdp.make_eval_step(plan, loss_of(dispatch), has_aux=True)
        params = fsdp.init_params(plan, jax.random.key(0))
        results[name] = int(evaluate(params, batch(np.float32))["aux"]["dropped"])
    assert results["dropless"] == 0
    # Of each rank's 36 choices 8 experts have room for 3 each.
    assert LAYERS * 8 * (36 - 24) <= results["tight"] < LAYERS * 8 * (36 - 8)


def test_every_device_has_its_own_experts(plan):
    params = fsdp.init_params(plan, jax.random.key(0))
    up = params["layers"]["experts"]["up"]
    held = {shard.index[1].indices(EXPERTS)[:2] for shard in up.addressable_shards}
    assert held == {(0, 4), (4, 8)}
    assert jnp.shape(up.addressable_shards[0].data)[1] == EXPERTS // 2
