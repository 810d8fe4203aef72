"""Parameters that the devices do not divide: split all the same, and nobody notices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.compare import host, worst
from helpers.compiles import compilations
from helpers.errors import facts
from jax.sharding import PartitionSpec

import fsdp_jax as fsdp
from fsdp_jax._tree import named_leaves
from fsdp_jax.sharding._padded import Padded

# The shapes of upstream's tests: 13, 17, 95, 101 and 333, none of which 8 divides.
SHAPES = {
    "layers": {"up": (3, 13, 17), "down": (3, 17, 13), "scale": (3, 13)},
    "odd": (95, 101),
    "bias": (333,),
    "even": (13, 16),
    "one": (1,),
}
ROWS = 16


def make_weights(key):
    shapes, treedef = jax.tree.flatten(SHAPES, is_leaf=lambda s: isinstance(s, tuple))
    keys = jax.random.split(key, len(shapes))
    leaves = [0.2 * jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]
    return treedef.unflatten(leaves)


def layer(w, x):
    return x + jnp.tanh((x * w["scale"][None]) @ w["up"]) @ w["down"], None


def loss_fn(weights, batch):
    x, _ = fsdp.scan(layer, weights["layers"], batch["x"])
    wide = jnp.tanh(x @ weights["even"]) @ jnp.ones((16, 95), x.dtype)
    odd = jnp.tanh(wide @ weights["odd"])
    bias = jnp.sin(weights["bias"][None, :101]) + weights["bias"][-1]
    return jnp.mean((odd * bias - batch["y"] * weights["one"][None]) ** 2)


def batch(dtype=np.float32):
    random = np.random.default_rng(0)
    return {
        "x": random.normal(size=(ROWS, 13)).astype(dtype),
        "y": random.normal(size=(ROWS, 101)).astype(dtype),
    }


def plan_of(mesh, **config):
    units = [fsdp.Stacked("layers")]
    return fsdp.fully_shard(make_weights, mesh, units, fsdp.FSDPConfig(**config))


def one_device():
    return fsdp.make_mesh(devices=jax.devices()[:1])


def trained(plan, tx, steps=3, num_microbatches=1):
    step = fsdp.make_train_step(plan, loss_fn, tx, num_microbatches=num_microbatches)
    state = fsdp.init_state(plan, tx, fsdp.init_params(plan, jax.random.key(1)))
    for _ in range(steps):
        state, metrics = step(state, batch(np.float64))
    return host(fsdp.unshard(state.params)), host(metrics)


@pytest.fixture(scope="module")
def plan():
    return plan_of(fsdp.make_mesh())


def test_what_does_not_divide_is_padded_and_nothing_else(plan):
    assert {param.name: param.split.padding for param in plan.param_plans} == {
        "bias": 3,
        "even": 0,
        "layers.down": 3,  # 17 takes 7, so 13 it is
        "layers.scale": 3,
        "layers.up": 3,
        "odd": 1,
        "one": 0,
    }
    whole = [param.name for param in plan.param_plans if param.split.dim is None]
    assert whole == ["one"]


OPTIMIZERS = {
    "adamw": optax.adamw(1e-2, eps=1e-8),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "muon": optax.contrib.muon(1e-2),
    "clip": optax.chain(optax.clip_by_global_norm(0.01), optax.sgd(0.5, momentum=0.9)),
    "lamb": optax.lamb(1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_are_exactly_those_of_the_unpadded_arrays(name):
    with jax.enable_x64(True):
        tx = OPTIMIZERS[name]
        got, metrics = trained(plan_of(fsdp.make_mesh()), tx)
        want, want_metrics = trained(plan_of(one_device()), tx)
        assert worst(got, want) < 1e-9
        for key in ("loss", "grad_norm"):
            assert abs(metrics[key] - want_metrics[key]) < 1e-9 * abs(want_metrics[key])


def test_updates_of_the_padded_arrays_would_be_noticed():
    # The negative control: the same optimizer on 16 x 17 with three rows of zeros.
    tx = OPTIMIZERS["adafactor"]
    grad = np.random.default_rng(0).normal(size=(13, 17)).astype(np.float32)
    params = np.ones((13, 17), np.float32)

    def update(pad):
        widths = ((0, pad), (0, 0))
        g, p = jnp.pad(grad, widths), jnp.pad(params, widths)
        return np.asarray(tx.update(g, tx.init(p), p)[0])[:13]

    assert worst({"w": update(3)}, {"w": update(0)}) > 1e-3


@pytest.mark.parametrize("strategy, outer", [(0, 0), (1, 0), (2, 0), (3, 0), (3, 1)])
def test_every_strategy_computes_what_one_device_computes(strategy, outer):
    with jax.enable_x64(True):
        tx = OPTIMIZERS["adamw"]
        plan = plan_of(
            fsdp.make_mesh(dp_outer=2),
            zero_dp_strategy=strategy,
            outer_dp_sharding_strategy=outer,
        )
        got, _ = trained(plan, tx, num_microbatches=2)
        want, _ = trained(plan_of(one_device()), tx)
    assert worst(got, want) < 1e-9


def test_each_device_stores_an_eighth_of_the_padded_array(plan):
    tx = OPTIMIZERS["adamw"]
    state = fsdp.init_state(plan, tx, fsdp.init_params(plan, jax.random.key(0)))
    odd = state.params["odd"]
    assert isinstance(odd, Padded)
    assert odd.shape == (95, 101) and odd.value.shape == (96, 101)
    assert {shard.data.shape for shard in odd.value.addressable_shards} == {(12, 101)}
    moments = [x for n, x in named_leaves(state.opt_state) if n.endswith("mu.odd")]
    assert [m.value.sharding.spec for m in moments] == [PartitionSpec("dp_shard")]
    held = sum(
        leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state.params)
    )
    assert held == plan.bytes_per_device["params"]


def test_no_optimizer_state_is_replicated_but_single_elements(plan):
    tx = OPTIMIZERS["adafactor"]
    state = fsdp.init_state(plan, tx, fsdp.init_params(plan, jax.random.key(0)))
    whole = [
        (name, leaf.shape)
        for name, leaf in named_leaves(state.opt_state)
        if getattr(leaf, "value", leaf).sharding.is_fully_replicated
    ]
    # Those of `one`, counters, and the place-owners that adafactor keeps.
    assert all(np.prod(shape) == 1 for _, shape in whole), whole


def test_a_padded_leaf_reads_as_the_array_of_its_logical_shape(plan):
    params = fsdp.init_params(plan, jax.random.key(0))
    want = np.asarray(params["bias"])
    state = fsdp.init_state(plan, OPTIMIZERS["adamw"], params)
    leaf = state.params["bias"]
    np.testing.assert_array_equal(np.asarray(leaf), want)
    assert float(jnp.max(leaf)) == want.max()
    np.testing.assert_array_equal(fsdp.sharding.unpack(state.params)["bias"], want)
    np.testing.assert_array_equal(fsdp.unshard(state.params)["bias"], want)
    assert not np.asarray(leaf.value)[333:].any()


def test_gradients_have_the_logical_shape(plan):
    params = fsdp.init_params(plan, jax.random.key(0))
    _, grads = fsdp.value_and_grad(plan, loss_fn)(params, batch())
    for (name, grad), (_, like) in zip(
        named_leaves(grads), named_leaves(plan.grads), strict=True
    ):
        assert grad.shape == like.shape, name
        assert grad.sharding.is_equivalent_to(like.sharding, grad.ndim), name
    # A state's packed parameters are as good as the like's.
    packed = fsdp.init_state(plan, OPTIMIZERS["adamw"], params).params
    _, again = fsdp.value_and_grad(plan, loss_fn)(packed, batch())
    assert worst(again, grads) == 0


def test_a_checkpoint_holds_logical_shapes_and_loads_on_any_mesh(plan, tmp_path):
    tx = OPTIMIZERS["adafactor"]
    step = fsdp.make_train_step(plan, loss_fn, tx)
    state = fsdp.init_state(plan, tx, fsdp.init_params(plan, jax.random.key(0)))
    state, _ = step(state, batch())
    fsdp.save(tmp_path, state)
    want = host(fsdp.unshard(state.params)), host(fsdp.unshard(state.opt_state))
    for devices in (8, 4, 3, 1):
        other = plan_of(fsdp.make_mesh(devices=jax.devices()[:devices]))
        got = fsdp.load(tmp_path, fsdp.abstract_state(other, tx))
        for have, wanted in zip((got.params, got.opt_state), want, strict=True):
            for (name, a), (_, b) in zip(
                named_leaves(have), named_leaves(wanted), strict=True
            ):
                np.testing.assert_array_equal(np.asarray(a), b, err_msg=name)
        params = fsdp.checkpoint.load_params(tmp_path, other.params)
        np.testing.assert_array_equal(params["odd"], want[0]["odd"])


def test_the_second_step_compiles_nothing(plan):
    tx = OPTIMIZERS["adamw"]
    step = fsdp.make_train_step(plan, loss_fn, tx)
    state = fsdp.init_state(plan, tx, fsdp.init_params(plan, jax.random.key(0)))
    state, _ = step(state, batch())
    with compilations() as heard:
        for _ in range(2):
            state, _ = step(state, batch())
    assert heard == []


def test_unsharded_weights_have_no_zeros_in_their_unit():
    seen = []

    def look(weights, batch):
        seen.append(jax.tree.map(jnp.shape, weights))
        return jnp.sum(batch["x"]) * weights["bias"].sum()

    plan = fsdp.fully_shard(make_weights, fsdp.make_mesh())
    fsdp.value_and_grad(plan, look)(fsdp.init_params(plan, jax.random.key(0)), batch())
    assert seen[0] == SHAPES


def test_what_is_not_padded_is_taken_over_and_not_copied(plan):
    params = fsdp.init_params(plan, jax.random.key(0))
    shards = params["even"].addressable_shards
    pointers = [shard.data.unsafe_buffer_pointer() for shard in shards]
    state = fsdp.init_state(plan, OPTIMIZERS["adamw"], params)
    shards = state.params["even"].addressable_shards
    assert [s.data.unsafe_buffer_pointer() for s in shards] == pointers


def test_packed_parameters_cannot_start_a_state_and_the_error_says_what_can(plan):
    tx = OPTIMIZERS["adamw"]
    state = fsdp.init_state(plan, tx, fsdp.init_params(plan, jax.random.key(0)))
    with pytest.raises(
        ValueError, match=facts("bias", "fsdp.sharding.unpack(state.params)")
    ):
        fsdp.init_state(plan, tx, state.params)


def test_updates_apply_to_packed_parameters_too(plan):
    tx = OPTIMIZERS["adamw"]
    params = fsdp.init_params(plan, jax.random.key(0))
    ones = jax.tree.map(jnp.ones_like, params)
    want = host(fsdp.training.apply_updates(plan, params, ones))
    packed = fsdp.init_state(plan, tx, params).params
    assert worst(host(fsdp.training.apply_updates(plan, packed, ones)), want) == 0
