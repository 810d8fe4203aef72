"""A train state is born sharded: nothing whole that could be split."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.errors import facts
from helpers.zoo import CASES
from jax.sharding import NamedSharding, PartitionSpec

import fsdp_jax as fsdp
from fsdp_jax._tree import named_leaves

MESH = fsdp.make_mesh()


def make_weights(key):
    layers, head = jax.random.split(key)
    return {
        "layers": {
            "w": jax.random.normal(layers, (3, 128, 256)),
            "b": jnp.zeros((3, 256)),
        },
        "head": jax.random.normal(head, (128, 384)),
        "temperature": jnp.ones(()),
    }


@pytest.fixture(scope="module")
def plan():
    return fsdp.fully_shard(make_weights, MESH, [fsdp.Stacked("layers")])


def on_devices(count: int, **sizes):
    return fsdp.make_mesh(devices=jax.devices()[:count], **sizes)


@pytest.mark.parametrize("name", ["nnx scanned", "plain pytree"])
def test_random_parameters_are_the_same_on_every_mesh(name):
    case, key = CASES[name], jax.random.key(1)
    want, _ = case.weights()  # of one device, from the same key
    for mesh in (on_devices(8), on_devices(4, dp_outer=2)):
        got = fsdp.init_params(case.plan(mesh), key)
        pairs = zip(named_leaves(got), named_leaves(want), strict=True)
        for (leaf_name, a), (_, b) in pairs:
            # XLA:CPU computes the ends of rows by other instructions than their middle,
            # and which is which depends on the split: one rounding of values below 1.
            np.testing.assert_allclose(a, b, rtol=0, atol=2**-23, err_msg=leaf_name)


def test_random_parameters_lie_as_planned_in_the_main_dtype():
    policy = fsdp.MixedPrecisionPolicy(main_params_dtype=jnp.bfloat16)
    plan = fsdp.fully_shard(make_weights, MESH, (), fsdp.FSDPConfig(mp_policy=policy))
    params = fsdp.init_params(plan, jax.random.key(0))
    for (name, leaf), (_, want) in zip(
        named_leaves(params), named_leaves(plan.params), strict=True
    ):
        assert leaf.dtype == jnp.bfloat16
        assert leaf.sharding.is_equivalent_to(want.sharding, leaf.ndim), name


def test_parameters_that_do_not_fit_are_all_named_before_anything_is_made(plan):
    good = fsdp.init_params(plan, jax.random.key(0))
    params = {
        "layers": {"w": good["layers"]["w"][:2], "bias": good["layers"]["b"]},
        "head": fsdp.unshard(good["head"]),
        "temperature": good["temperature"].astype(jnp.bfloat16),
    }
    with pytest.raises(ValueError) as error:
        fsdp.init_state(plan, optax.adam(1e-3), params)
    says = str(error.value)
    assert "params does not fit the plan in 5 place(s)" in says
    assert "missing: layers.b" in says
    assert "unexpected: layers.bias" in says
    assert "layers.w: shape (2, 128, 256), planned (3, 128, 256)" in says
    assert "temperature: dtype bfloat16, planned float32" in says
    assert re.search("head: sharding .*, planned .*dp_shard", says)
    assert "init_params(plan, key)" in says


def test_parameters_on_the_host_do_not_fit(plan):
    params = jax.device_get(fsdp.init_params(plan, jax.random.key(0)))
    with pytest.raises(ValueError, match=facts("head", "None", "P('dp_shard',)")):
        fsdp.init_state(plan, optax.sgd(0.1), params)


def labels(params):
    return {
        "layers": jax.tree.map(lambda _: "adam", params["layers"]),
        "head": "sgd",
        "temperature": "sgd",
    }


OPTIMIZERS = {
    "adamw": optax.adamw(1e-3),
    "momentum": optax.sgd(1e-3, momentum=0.9),
    "lion": optax.lion(1e-3),
    "adafactor": optax.adafactor(1e-3),
    "muon": optax.contrib.muon(1e-3),
    "schedule": optax.adam(optax.cosine_decay_schedule(1e-3, 100)),
    "masked": optax.adamw(1e-3, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
    "multi_transform": optax.multi_transform(
        {"adam": optax.adam(1e-3), "sgd": optax.sgd(1e-3, momentum=0.9)}, labels
    ),
    "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_optimizer_state_that_divides_is_replicated(plan, name):
    state = fsdp.abstract_state(plan, OPTIMIZERS[name]).opt_state
    split = 0
    for leaf_name, leaf in named_leaves(state):
        if any(size % 8 == 0 for size in leaf.shape):
            assert leaf.sharding.shard_shape(leaf.shape) != leaf.shape, leaf_name
            split += 1
        else:
            assert leaf.size <= 3, leaf_name  # scalars, adafactor's placeholders
    assert split >= 2


def test_accumulating_in_the_optimizer_is_refused_with_advice(plan):
    tx = optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation()
    for inner in (tx, optax.chain(optax.clip(1.0), tx)):
        with pytest.raises(
            ValueError,
            match=facts("optax.MultiSteps", "make_train_step(..., num_microbatches=k)"),
        ):
            fsdp.abstract_state(plan, inner)


def test_adams_moments_lie_exactly_as_their_parameters(plan):
    adam, *_ = fsdp.abstract_state(plan, optax.adam(1e-3)).opt_state
    for moment in (adam.mu, adam.nu):
        assert moment == plan.params


def test_adafactors_factors_are_split_though_they_have_other_shapes(plan):
    factored = fsdp.abstract_state(plan, optax.adafactor(1e-3)).opt_state[0]
    assert factored.v_row["layers"]["w"].shape == (3, 128)
    assert factored.v_col["layers"]["w"].shape == (3, 256)
    for factor in (factored.v_row, factored.v_col):
        spec = factor["layers"]["w"].sharding.spec
        assert spec == PartitionSpec(None, "dp_shard")


def test_parameters_whose_names_end_alike_are_not_confused():
    def make(key):
        return {"w": jnp.ones((8, 8)), "b": {"w": jnp.ones((8, 8))}}

    plan = fsdp.fully_shard(make, MESH, (), fsdp.FSDPConfig(replicated=("w",)))
    adam, *_ = fsdp.abstract_state(plan, optax.adam(1e-3)).opt_state
    assert adam.mu == plan.params


def test_a_state_is_born_in_its_abstract_tree(plan):
    tx = OPTIMIZERS["multi_transform"]
    state = fsdp.init_state(plan, tx, fsdp.init_params(plan, jax.random.key(0)))
    like = fsdp.abstract_state(plan, tx)
    assert jax.tree.structure(state) == jax.tree.structure(like)
    for (name, leaf), (_, want) in zip(
        named_leaves(state), named_leaves(like), strict=True
    ):
        assert (leaf.shape, leaf.dtype) == (want.shape, want.dtype), name
        assert leaf.sharding.is_equivalent_to(want.sharding, leaf.ndim), name


def test_the_optimizer_starts_from_the_parameters_it_is_given(plan):
    keep = optax.GradientTransformation(
        lambda params: params, lambda grads, state, params=None: (grads, state)
    )
    params = fsdp.init_params(plan, jax.random.key(0))
    state = fsdp.init_state(plan, keep, params)
    np.testing.assert_array_equal(state.opt_state["head"], params["head"])
    # A copy: the step donates the state, and no buffer can be given away twice.
    kept = state.opt_state["head"].addressable_shards[0].data
    given = params["head"].addressable_shards[0].data
    assert kept.unsafe_buffer_pointer() != given.unsafe_buffer_pointer()


def test_gather_replicates_every_leaf(plan):
    params = fsdp.init_params(plan, jax.random.key(0))
    whole = fsdp.unshard({**params, "key": jax.random.key(0)})
    for name in ("head", "temperature"):
        for shard in whole[name].addressable_shards:
            np.testing.assert_array_equal(shard.data, params[name])
    assert len(whole["head"].addressable_shards) == 8
    assert whole["head"].sharding == NamedSharding(MESH, PartitionSpec())


def test_a_state_cannot_be_changed_in_place(plan):
    state = fsdp.abstract_state(plan, optax.sgd(0.1))
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.params = None
