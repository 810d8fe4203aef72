"""Each dtype of a policy is honoured where it says, and nowhere else."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.errors import facts
from helpers.hlo import stablehlo_dtypes
from helpers.processes import run_processes

import fsdp_jax as fsdp
from fsdp_jax._tree import named_leaves

BF16, FP16, FP32 = jnp.bfloat16, jnp.float16, jnp.float32
ROWS = 24


def make_weights(key):
    return {
        "layers": {"w": jnp.ones((3, 16, 16)), "norm": jnp.ones((3, 16))},
        "head": jnp.ones((16, 16)),
    }


def layer(w, x):
    return x + (x * w["norm"][None]) @ w["w"], None


def loss_fn(weights, batch):
    x, _ = fsdp.scan(layer, weights["layers"], batch["x"])
    return jnp.mean((x @ weights["head"]).astype(jnp.float32) ** 2)


def program(mesh, num_microbatches=1, policy=None, **config):
    """The StableHLO of a step, before any backend widened its collectives."""
    plan = fsdp.fully_shard(
        make_weights,
        fsdp.make_mesh(**mesh),
        [fsdp.Stacked("layers")],
        fsdp.FSDPConfig(
            mp_policy=fsdp.MixedPrecisionPolicy(**(policy or {})), **config
        ),
    )
    tx = optax.sgd(0.1)
    step = fsdp.make_train_step(plan, loss_fn, tx, num_microbatches=num_microbatches)
    rows = {"x": jax.ShapeDtypeStruct((ROWS, 16), jnp.float32)}
    return step.lower(fsdp.abstract_state(plan, tx), rows).as_text()


# (policy, dtype of gathers, of the reduce-scatter, of the reduction across replicas)
POLICIES = {
    "float32": ({}, "f32", "f32", "f32"),
    "bf16 weights": ({"param_dtype": BF16}, "bf16", "f32", "f32"),
    "bf16 communicated": ({"grad_comm_dtype": BF16}, "f32", "bf16", "bf16"),
    "f16 communicated, bf16 weights": (
        {"param_dtype": BF16, "grad_comm_dtype": FP16},
        *("bf16", "f16", "f16"),
    ),
    "bf16 gradients": ({"main_grads_dtype": BF16}, "f32", "bf16", "bf16"),
    "bf16 gradients, f32 communicated": (
        {"main_grads_dtype": BF16, "grad_comm_dtype": FP32},
        *("f32", "f32", "f32"),
    ),
    "bf16 everything": (
        {"param_dtype": BF16, "main_params_dtype": BF16},
        *("bf16", "bf16", "bf16"),
    ),
}


@pytest.mark.parametrize("name", POLICIES)
def test_the_policy_is_communicated_on_both_levels(name):
    policy, gathered, scattered, across = POLICIES[name]
    hsdp = program({"dp_outer": 2}, num_microbatches=3, policy=policy)
    assert stablehlo_dtypes(hsdp, "all_gather") == {gathered}
    assert stablehlo_dtypes(hsdp, "reduce_scatter") == {scattered}
    assert stablehlo_dtypes(hsdp, "all_reduce") == {across}
    hfsdp = program(
        {"dp_outer": 2}, num_microbatches=3, policy=policy, outer_dp_sharding_strategy=1
    )
    assert stablehlo_dtypes(hfsdp, "reduce_scatter") == {scattered}
    # What the outer axis gathers when the step begins is communicated narrow too.
    assert stablehlo_dtypes(hfsdp, "all_gather") == {gathered}


def state_of(policy, num_microbatches=1):
    plan = fsdp.fully_shard(
        make_weights,
        fsdp.make_mesh(),
        [fsdp.Stacked("layers")],
        fsdp.FSDPConfig(mp_policy=fsdp.MixedPrecisionPolicy(**policy)),
    )
    return plan, fsdp.init_params(plan, jax.random.key(0))


@pytest.mark.parametrize("name", POLICIES)
def test_weights_and_gradients_are_stored_in_their_main_dtypes(name):
    policy = POLICIES[name][0]
    plan, params = state_of(policy)
    _, grads = fsdp.value_and_grad(plan, loss_fn)(
        params, {"x": np.ones((ROWS, 16), np.float32)}
    )
    main = jnp.dtype(policy.get("main_params_dtype", FP32))
    main_grads = jnp.dtype(policy.get("main_grads_dtype", main))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {main}
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {main_grads}


# Accumulation in float32 by name


def linear_loss(weights, batch):
    """Its gradient to each element of a weight is the mean of `x`."""
    total = sum(leaf.sum().astype(jnp.float32) for leaf in jax.tree.leaves(weights))
    return total * batch["x"].mean()


def accumulated(patterns, values):
    """The gradients of one microbatch for each of `values`."""
    policy = fsdp.MixedPrecisionPolicy(
        main_grads_dtype=BF16,
        grad_comm_dtype=BF16,
        param_name_patterns_for_fp32_local_accumulation=patterns,
    )
    plan = fsdp.fully_shard(
        lambda key: {"router": jnp.ones((8, 8)), "mlp": jnp.ones((8, 8))},
        fsdp.make_mesh(),
        config=fsdp.FSDPConfig(mp_policy=policy),
    )
    x = np.repeat(np.asarray(values, np.float32)[None], 8, 0).reshape(-1)
    compute = fsdp.value_and_grad(plan, linear_loss, num_microbatches=len(values))
    params = fsdp.init_params(plan, jax.random.key(0))
    _, grads = compute(params, {"x": x})
    return plan, {name: np.asarray(leaf) for name, leaf in named_leaves(grads)}


def test_only_named_parameters_accumulate_in_float32():
    # 16 microbatches of gradient 1, then 16 of 2^-7: in bfloat16, with 8 bits, sums
    # near 16 do not notice what is added.
    values = [1.0] * 16 + [2.0**-7] * 16
    exact = np.float32(16 + 16 * 2.0**-7) / 32
    for patterns, wide in (
        (("router",), {"router"}),
        (("all",), {"router", "mlp"}),
        ((), set()),
    ):
        plan, grads = accumulated(patterns, values)
        for name, grad in grads.items():
            assert grad.dtype == (np.float32 if name in wide else BF16), patterns
            right = bool((grad.astype(np.float32) == exact).all())
            assert right == (name in wide), (patterns, name)
        like = dict(named_leaves(plan.grads))
        assert {n for n, g in like.items() if g.dtype == FP32} == wide


def test_what_is_communicated_does_not_change():
    for patterns in ((), ("all",)):
        policy = {
            "main_grads_dtype": BF16,
            "param_name_patterns_for_fp32_local_accumulation": patterns,
        }
        text = program({}, num_microbatches=3, policy=policy)
        assert stablehlo_dtypes(text, "reduce_scatter") == {"bf16"}


@pytest.mark.parametrize("policy", [{}, {"main_grads_dtype": FP32}], ids=str)
def test_patterns_that_would_do_nothing_are_refused(policy):
    with pytest.raises(
        ValueError,
        match=facts("patterns=('*',)", "float32", "main_grads_dtype=jnp.bfloat16"),
    ):
        fsdp.MixedPrecisionPolicy(
            param_name_patterns_for_fp32_local_accumulation=("*",), **policy
        )
    with pytest.raises(
        ValueError,
        match=facts("param_name_patterns_for_fp32_local_accumulation=('router',)"),
    ):
        fsdp.MixedPrecisionPolicy(
            main_grads_dtype=BF16,
            param_name_patterns_for_fp32_local_accumulation="router",
        )


# What is scaled, and when


def test_small_gradients_of_a_half_precision_model_do_not_vanish():
    # 2^-24 is the smallest float16; a loss scaled by 1 / 24 before backward loses it.
    policy = fsdp.MixedPrecisionPolicy(param_dtype=FP16, grad_comm_dtype=FP32)
    plan = fsdp.fully_shard(
        lambda key: {"w": jnp.ones((8, 8))},
        fsdp.make_mesh(),
        config=fsdp.FSDPConfig(mp_policy=policy),
    )

    def loss(weights, batch):
        tiny = (weights["w"] * jnp.asarray(2.0**-24, FP16)).sum()
        return tiny.astype(jnp.float32) * batch["x"].mean()

    params = fsdp.init_params(plan, jax.random.key(0))
    compute = fsdp.value_and_grad(plan, loss, num_microbatches=3)
    _, grads = compute(params, {"x": np.ones(24, np.float32)})
    np.testing.assert_allclose(grads["w"], np.full((8, 8), 2.0**-24), rtol=1e-6)


def mean_over(ranks: int) -> list[list[float]]:
    """The gradient of random rows, one a rank, and what it is to be."""
    # Upstream: bf16 * 2^-k, summed in fp32, is the fp32 sum * 2^-k, to the bit.
    policy = fsdp.MixedPrecisionPolicy(
        grad_comm_dtype=BF16, reduce_scatter_with_fp32_accumulation=True
    )
    plan = fsdp.fully_shard(
        lambda key: {"w": jnp.zeros(1024)},
        fsdp.make_mesh(devices=jax.devices()[:ranks]),
        config=fsdp.FSDPConfig(mp_policy=policy),
    )
    rows = np.random.default_rng(0).uniform(size=(ranks, 1024)).astype(BF16)

    def loss(weights, batch):
        return (weights["w"] * batch["x"][0].astype(jnp.float32)).sum()

    params = fsdp.init_params(plan, jax.random.key(0))
    _, grads = fsdp.value_and_grad(plan, loss)(params, {"x": rows})
    # All-to-all leaves the order of the ranks, so the sum is that of a loop over them.
    total = np.zeros(1024, np.float32)
    for row in rows:
        total += row.astype(np.float32)
    return [np.asarray(grads["w"]).tolist(), (total / ranks).tolist()]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_power_of_two_is_divided_out_before_communication_without_a_trace(ranks):
    found, want = mean_over(ranks)
    assert found == want


def test_sixteen_ranks_leave_no_trace_either():
    ((found, want),) = run_processes(mean_over, 1, 16, devices=16)
    assert found == want


def test_twenty_draws_of_a_wide_sum_are_float32s_and_not_bfloat16s():
    # Upstream's 20 trials of 100,000 uniform bfloat16s: here 12,800 a rank.
    def reduce(wide):
        policy = fsdp.MixedPrecisionPolicy(
            grad_comm_dtype=BF16 if wide else FP32,
            reduce_scatter_with_fp32_accumulation=wide,
        )
        plan = fsdp.fully_shard(
            lambda key: {"w": jnp.zeros(12800)},
            fsdp.make_mesh(),
            config=fsdp.FSDPConfig(mp_policy=policy),
        )

        def loss(weights, batch):
            return (weights["w"] * batch["x"][0].astype(jnp.float32)).sum()

        params = fsdp.init_params(plan, jax.random.key(0))
        compute = fsdp.value_and_grad(plan, loss)
        return lambda x: np.asarray(compute(params, {"x": x})[1]["w"])

    wide, exact = reduce(True), reduce(False)
    random = np.random.default_rng(0)
    for _ in range(20):
        x = random.uniform(size=(8, 12800)).astype(BF16)
        np.testing.assert_allclose(wide(x), exact(x), rtol=1e-6)
        # The negative control: a sum that is rounded to bfloat16 at each addition.
        narrow = np.zeros(12800, BF16)
        for row in x:
            narrow = (narrow + row).astype(BF16)
        assert not np.allclose(narrow.astype(np.float32) / 8, exact(x), rtol=1e-4)


def test_more_tokens_than_bfloat16_counts_are_divided_by_exactly():
    tokens = 1000  # a row: 24,000 in all, each with the gradient 0.001

    def loss(weights, batch):
        count = tokens * batch["x"].shape[0]
        return weights["w"].sum() * 0.001 * count * 10, count * 10

    plan = fsdp.fully_shard(
        lambda key: {"w": jnp.ones((8, 8))},
        fsdp.make_mesh(),
        config=fsdp.FSDPConfig(
            mp_policy=fsdp.MixedPrecisionPolicy(main_grads_dtype=BF16)
        ),
    )
    params = fsdp.init_params(plan, jax.random.key(0))
    compute = fsdp.value_and_grad(plan, loss, calculate_per_token_loss=True)
    _, grads = compute(params, {"x": np.ones((24, 1), np.float32)})
    got = np.asarray(grads["w"]).astype(np.float32)
    np.testing.assert_allclose(got, 0.001, rtol=float(2 * jnp.finfo(BF16).eps))


def test_a_parameter_of_float8_is_updated_in_float32():
    plan = fsdp.fully_shard(
        lambda key: {"w": jnp.full((16, 16), 0.5, jnp.float8_e4m3fn)}, fsdp.make_mesh()
    )
    tx = optax.sgd(1e-3)
    state = fsdp.init_state(plan, tx, fsdp.init_params(plan, jax.random.key(0)))
    assert state.params["w"].dtype == FP32

    def loss_fn(params, batch):
        assert params["w"].dtype == jnp.float8_e4m3fn
        return jnp.mean(batch @ params["w"].astype(FP32))

    # The gradient is 1/16 for each element, which float8 represents; the update is less
    # than its step there.
    state, _ = fsdp.make_train_step(plan, loss_fn, tx)(state, jnp.ones((16, 16)))
    np.testing.assert_allclose(state.params["w"], 0.5 - 1e-3 / 16, rtol=1e-6)
