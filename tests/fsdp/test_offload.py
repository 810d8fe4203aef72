"""A state that rests on the host: where it lies, and that nothing else changes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.compare import host
from helpers.errors import facts

import fsdp_jax as fsdp
from fsdp_jax.sharding._offload import check_kinds

TX = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
LAYERS, ROWS = 3, 16
SIZES = {"even": (16, 32), "odd": (13, 37)}
BOTH = fsdp.OffloadPolicy(params=True, min_elements=100)


def make_weights(sizes):
    embed, mlp = SIZES[sizes]

    def make(key):
        up, down, head = jax.random.split(key, 3)
        return {
            "layers": {
                "up": 0.3 * jax.random.normal(up, (LAYERS, embed, mlp)),
                "down": 0.3 * jax.random.normal(down, (LAYERS, mlp, embed)),
                "norm": jnp.ones((LAYERS, embed)),
            },
            "head": 0.3 * jax.random.normal(head, (embed, 8)),
        }

    return make


def layer(w, x):
    return x + jnp.tanh((x * w["norm"][None]) @ w["up"]) @ w["down"], None


def loss_fn(weights, batch):
    x, _ = fsdp.scan(layer, weights["layers"], batch["x"].astype(weights["head"].dtype))
    return jnp.mean((x @ weights["head"] - batch["y"]).astype(jnp.float32) ** 2)


def rows_of(sizes):
    random = np.random.default_rng(0)
    shapes = {"x": (ROWS, SIZES[sizes][0]), "y": (ROWS, 8)}
    return {k: random.normal(size=s).astype(np.float32) for k, s in shapes.items()}


def plan_of(offload, sizes, policy=None, mesh=None, **config):
    return fsdp.fully_shard(
        make_weights(sizes),
        fsdp.make_mesh(**(mesh or {})),
        [fsdp.Stacked("layers")],
        fsdp.FSDPConfig(
            mp_policy=fsdp.MixedPrecisionPolicy(**(policy or {})),
            offload=offload,
            **config,
        ),
    )


@functools.cache
def trained(offload, case):
    """The plan and the state after three steps."""
    sizes, options, step_options = CASES[case]
    plan = plan_of(offload, sizes, **options)
    step = fsdp.make_train_step(plan, loss_fn, TX, **step_options)
    state = fsdp.init_state(plan, TX, fsdp.init_params(plan, jax.random.key(0)))
    for _ in range(3):
        state, metrics = step(state, rows_of(sizes))
    return plan, state, metrics


CASES = {
    "float32": ("even", {}, {}),
    "padded, bfloat16, microbatches": (
        "odd",
        {"policy": {"param_dtype": jnp.bfloat16}, "frozen": ("head",)},
        {"num_microbatches": 2, "on_nonfinite": "skip"},
    ),
    "HFSDP, float8": (
        "even",
        {
            "policy": {"param_gather": fsdp.sharding.Float8Gather(min_elements=100)},
            "mesh": {"dp_outer": 2},
            "outer_dp_sharding_strategy": 1,
        },
        {},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_three_steps_are_the_same_to_the_bit(case):
    _, want, _ = trained(None, case)
    plan, got, metrics = trained(BOTH, case)
    jax.tree.map(np.testing.assert_array_equal, host(got.params), host(want.params))
    jax.tree.map(
        np.testing.assert_array_equal, host(got.opt_state), host(want.opt_state)
    )
    assert np.isfinite(metrics["loss"])
    like = fsdp.abstract_state(plan, TX)
    jax.tree.map(lambda a, b: _same_place(a, b), got, like)


def _same_place(leaf, like):
    assert leaf.sharding.memory_kind == like.sharding.memory_kind
    assert leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim)


def test_what_is_large_is_stored_on_the_host_and_all_else_is_not():
    _, state, _ = trained(BOTH, "float32")
    for tree in (state.params, state.opt_state):
        for name, leaf in fsdp.sharding.named_leaves(tree):
            want = "pinned_host" if leaf.size >= 100 else "device"
            assert leaf.sharding.memory_kind == want, name
    plan = plan_of(fsdp.OffloadPolicy(), "even")
    like = fsdp.abstract_state(plan, TX)
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(like.params)}
    assert kinds == {"device"}


def test_a_fraction_of_the_optimizer_state_is_stored_on_the_host():
    half = fsdp.OffloadPolicy(min_elements=100, optimizer_fraction=0.5)
    _, want, _ = trained(None, "float32")
    _, got, _ = trained(half, "float32")
    jax.tree.map(np.testing.assert_array_equal, host(got.params), host(want.params))
    sizes = {"pinned_host": 0, "device": 0}
    for name, leaf in fsdp.sharding.named_leaves(got.opt_state):
        if leaf.size >= 100:
            sizes[leaf.sharding.memory_kind] += leaf.nbytes
            is_first = ".mu." in name
            assert leaf.sharding.memory_kind == ("device", "pinned_host")[is_first]
    assert sizes["pinned_host"] == sizes["device"]


def test_a_checkpoint_knows_no_memory(tmp_path):
    case = "padded, bfloat16, microbatches"
    plan, state, _ = trained(BOTH, case)
    fsdp.save(tmp_path / "run", state)
    elsewhere, _, _ = trained(None, case)
    for there in (elsewhere, plan):
        like = fsdp.abstract_state(there, TX)
        loaded = fsdp.load(tmp_path / "run", like)
        jax.tree.map(
            np.testing.assert_array_equal, host(loaded.params), host(state.params)
        )
        jax.tree.map(lambda a, b: _same_place(a, b), loaded, like)
    plain = fsdp.sharding.unpack(state.params)
    assert np.asarray(plain["layers"]["up"]).shape == (3, 13, 37)
    assert fsdp.unshard(state.params)["layers"]["up"].shape == (3, 13, 37)


@pytest.mark.parametrize("offload", [None, BOTH])
def test_a_state_goes_to_the_host_and_back_and_trains_on_to_the_same_bits(offload):
    plan = plan_of(offload, "odd")
    step = fsdp.make_train_step(plan, loss_fn, TX)
    like = fsdp.abstract_state(plan, TX)

    def begin():
        state = fsdp.init_state(plan, TX, fsdp.init_params(plan, jax.random.key(0)))
        return step(state, rows_of("odd"))[0]

    state = begin()
    away = fsdp.training.offload_state(state)
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(away)}
    assert kinds == {"pinned_host"}
    back = fsdp.training.onload_state(away, like)
    jax.tree.map(_same_place, back, like)
    # What moved is where it is now, and nowhere else.
    for before, after in ((state, away), (away, back)):
        for old, new in zip(*map(jax.tree.leaves, (before, after)), strict=True):
            assert old is new or old.is_deleted()
    on, want = (step(s, rows_of("odd"))[0] for s in (back, begin()))
    jax.tree.map(np.testing.assert_array_equal, host(on.params), host(want.params))


def test_a_state_comes_back_to_a_state_like_itself():
    plan = plan_of(None, "even")
    params = fsdp.init_params(plan, jax.random.key(0))
    away = fsdp.training.offload_state(params)
    like = fsdp.abstract_state(plan, TX)
    with pytest.raises(ValueError, match=facts("like", "TrainState", "abstract_state")):
        fsdp.training.onload_state(away, like)
    assert not fsdp.training.onload_state(away, like.params)["head"].is_deleted()


def test_evaluation_fetches_what_is_stored_on_the_host():
    case = "float32"
    losses = []
    for offload in (None, BOTH):
        plan, state, _ = trained(offload, case)
        evaluate = fsdp.make_eval_step(plan, loss_fn)
        losses.append(float(evaluate(state.params, rows_of("even"))["loss"]))
    assert losses[0] == losses[1]


def test_activations_go_to_the_host_and_come_back_by_a_policy_of_jax():
    policies = jax.checkpoint_policies
    grads, residuals = [], []
    for policy in (
        policies.dots_with_no_batch_dims_saveable,
        policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
    ):
        plan = plan_of(None, "even", remat_policy=policy)
        params = fsdp.init_params(plan, jax.random.key(0))
        compute = fsdp.value_and_grad(plan, loss_fn)
        grads.append(host(compute(params, rows_of("even"))[1]))
        traced = jax.make_jaxpr(compute)(params, rows_of("even"))
        residuals.append(str(traced).count("<host>"))
    jax.tree.map(np.testing.assert_array_equal, *grads)
    assert residuals[0] == 0 < residuals[1]


def test_what_cannot_be_is_refused_by_name():
    with pytest.raises(
        ValueError, match=facts("OffloadPolicy(optimizer=False, params=False)")
    ):
        fsdp.OffloadPolicy(optimizer=False)
    for bad in (0.0, 1.5):
        with pytest.raises(ValueError, match=facts(f"optimizer_fraction={bad}")):
            fsdp.OffloadPolicy(optimizer_fraction=bad)
    with pytest.raises(ValueError, match=facts("optimizer_fraction", "0.5")):
        fsdp.OffloadPolicy(optimizer=False, params=True, optimizer_fraction=0.5)
    with pytest.raises(
        ValueError, match=facts("FSDPConfig(offload=...)", "'pinned_host'", "'abacus'")
    ):
        check_kinds("abacus", ["device"])
    check_kinds("cpu", ["device", "pinned_host"])
    check_kinds("cuda", [])  # No such device is here.
