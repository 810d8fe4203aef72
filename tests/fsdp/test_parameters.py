"""Parameters of every kind: frozen, shared, of mixed dtypes, integer, tiny."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.compare import host, worst
from helpers.errors import facts
from helpers.hlo import collectives
from helpers.zoo import CASES, batch

import fsdp_jax as fsdp
from fsdp_jax._tree import named_leaves

TX = optax.adamw(1e-2, eps=1e-3)
CASE = CASES["nnx scanned"]


def one_device():
    return fsdp.make_mesh(devices=jax.devices()[:1])


def trained(plan, loss, tx, params, data, steps=3, **options):
    step = fsdp.make_train_step(plan, loss, tx, **options)
    state = fsdp.init_state(plan, tx, params)
    for _ in range(steps):
        state, _ = step(state, data)
    return state


# Frozen


FROZEN = ("layers.up", "layers.norm", "head.bias")


def is_frozen(name):
    return name.startswith(FROZEN)


@pytest.fixture(scope="module")
def frozen():
    """(plan, state before, state after three steps) with some parameters frozen."""
    plan = CASE.plan(fsdp.make_mesh(dp_outer=2), frozen=FROZEN)
    before = fsdp.init_state(plan, TX, CASE.sharded(plan))
    names = {name: np.asarray(leaf) for name, leaf in named_leaves(before.params)}
    after = trained(
        plan, CASE.loss, TX, before.params, batch(rows=24), num_microbatches=3
    )
    return plan, names, after


def test_frozen_parameters_stay_and_all_others_move(frozen):
    _, before, after = frozen
    moved = {
        name: bool((np.asarray(leaf) != before[name]).any())
        for name, leaf in named_leaves(after.params)
    }
    assert moved == {name: not is_frozen(name) for name in before}


def test_what_is_frozen_has_neither_gradient_nor_optimizer_state(frozen):
    plan, before, after = frozen
    trained = {name for name in before if not is_frozen(name)}
    assert {name for name, _ in named_leaves(plan.grads)} == trained
    moments = [name for name, _ in named_leaves(after.opt_state) if "mu." in name]
    assert {name.partition("mu.")[2] for name in moments} == trained


def test_the_others_are_trained_as_by_an_optimizer_that_masks(frozen):
    plan, _, after = frozen
    whole = CASE.plan(one_device())
    params = CASE.sharded(whole)
    labels = plan.treedef.unflatten(
        "frozen" if param.is_frozen else "trained" for param in plan.param_plans
    )
    tx = optax.multi_transform({"trained": TX, "frozen": optax.set_to_zero()}, labels)
    want = trained(whole, CASE.loss, tx, params, batch(rows=24)).params
    # Biases that are frozen at zero have no relative error.
    zero = (*CASE.zero_grads, "up.bias", "norm.bias", "head.bias")
    assert worst(host(after.params), host(want), without=zero) < 1e-5


def test_a_frozen_parameter_is_stored_in_its_compute_dtype():
    policy = fsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16)
    plan = CASE.plan(fsdp.make_mesh(), frozen=("layers.up",), mp_policy=policy)
    dtypes = {name: leaf.dtype for name, leaf in named_leaves(plan.params)}
    assert dtypes["layers.up.kernel"] == jnp.bfloat16
    assert dtypes["layers.down.kernel"] == jnp.float32
    assert "frozen" in repr(plan)


def test_the_gradient_of_a_frozen_weight_is_not_even_computed():
    case = CASES["plain pytree"]
    dots, scatters = {}, {}
    for frozen in ((), ("stack.up", "layers.*.up")):
        plan = case.plan(fsdp.make_mesh(), frozen=frozen, prefetch=0)
        step = fsdp.make_train_step(plan, case.loss, TX)
        lowered = step.lower(fsdp.abstract_state(plan, TX), batch())
        text = lowered.compile().as_text()
        dots[frozen] = text.count(" dot(")
        found = collectives(text)
        scatters[frozen] = sum(c.op == "reduce-scatter" for c in found)
    (all_dots, fewer), (all_scatters, left) = dots.values(), scatters.values()
    assert fewer < all_dots
    assert all_scatters - left == 3  # the stack's, and those of two layers


def test_a_loop_of_ones_own_leaves_frozen_parameters_alone():
    plan = CASE.plan(fsdp.make_mesh(), frozen=FROZEN)
    params = CASE.sharded(plan)
    model_state = fsdp.init_state(plan, TX, params).model_state
    opt_state = TX.init(fsdp.trainable(plan, params))
    (_, _, model_state), grads = fsdp.value_and_grad(plan, CASE.loss)(
        params, batch(), key=jax.random.key(0), model_state=model_state
    )
    updates, _ = TX.update(grads, opt_state, fsdp.trainable(plan, params))
    new = fsdp.training.apply_updates(plan, params, updates)
    for (name, a), (_, b) in zip(named_leaves(new), named_leaves(params), strict=True):
        assert (np.asarray(a) == np.asarray(b)).all() == is_frozen(name), name


def test_a_frozen_tied_weight_is_no_error():
    plan = fsdp.fully_shard(
        lambda key: Tied(nnx.Rngs(key)),
        fsdp.make_mesh(),
        [Half],
        fsdp.FSDPConfig(frozen=("first.weight",)),
    )
    params = fsdp.init_params(plan, jax.random.key(0))
    before = host(params)
    after = trained(plan, tied_loss, optax.sgd(0.1), params, tied_batch())
    moved = {
        name: bool((np.asarray(a) != np.asarray(b)).any())
        for (name, a), (_, b) in zip(
            named_leaves(after.params), named_leaves(before), strict=True
        )
    }
    assert moved == {"first.scale": True, "first.weight": False, "second.scale": True}


def test_freezing_everything_is_refused():
    with pytest.raises(ValueError, match=facts("FSDPConfig(frozen=('*',))", "16")):
        CASE.plan(fsdp.make_mesh(), frozen=("*",))


# Shared


class Half(nnx.Module):
    """A unit that shares its weight with another one."""

    def __init__(self, rngs, weight=None):
        initial = 0.3 * jax.random.normal(rngs.params(), (16, 16))
        self.weight = weight or nnx.Param(initial)
        self.scale = nnx.Param(jnp.ones(16))

    def __call__(self, x):
        return jnp.tanh(x @ self.weight[...]) * self.scale[...][None]


class Tied(nnx.Module):
    def __init__(self, rngs):
        self.first = Half(rngs)
        self.second = Half(rngs, self.first.weight)

    def __call__(self, x):
        return self.second(self.first(x))


def tied_loss(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def tied_batch():
    random = np.random.default_rng(0)
    return {name: random.normal(size=(24, 16)).astype("f") for name in "xy"}


@pytest.mark.parametrize("num_microbatches", [1, 3])
@pytest.mark.parametrize("mesh", [{}, {"dp_outer": 2}], ids=["FSDP", "HSDP"])
def test_two_units_that_share_a_weight_sum_its_gradient(mesh, num_microbatches):
    def make(key):
        return Tied(nnx.Rngs(key))

    results = []
    for on, k in (
        (fsdp.make_mesh(**mesh), num_microbatches),
        (one_device(), 1),
    ):
        plan = fsdp.fully_shard(make, on, [Half])
        assert len(plan.param_plans) == 3
        params = fsdp.init_params(plan, jax.random.key(0))
        state = trained(plan, tied_loss, TX, params, tied_batch(), num_microbatches=k)
        results.append(host(state.params))
    assert worst(*results) < 1e-5


# Mixed


def mixed_weights(key):
    return {
        "layers": {
            "w": 0.3 * jax.random.normal(key, (3, 16, 16), jnp.bfloat16),
            "norm": jnp.ones((3, 16), jnp.float32),
            "half": jnp.ones((3, 16), jnp.float16),
            "gain": jnp.ones((3,), jnp.float32),
        },
        "table": jnp.arange(16, dtype=jnp.int32),
    }


def mixed_layer(w, x):
    seen = {name: leaf.dtype.name for name, leaf in w.items()}
    assert seen == {
        **{"w": "bfloat16", "norm": "float32", "half": "float16", "gain": "float32"}
    }
    x = x * w["norm"][None] * w["gain"] + w["half"].astype(x.dtype)[None]
    return x + jnp.tanh(x @ w["w"].astype(x.dtype)), None


def mixed_loss(weights, batch):
    x, _ = fsdp.scan(mixed_layer, weights["layers"], batch["x"])
    return jnp.mean((x[:, weights["table"]] - batch["y"]) ** 2)


def test_dtypes_may_be_mixed_within_a_unit_and_each_weight_keeps_its_own():
    states = []
    for mesh in (fsdp.make_mesh(dp_outer=2), one_device()):
        plan = fsdp.fully_shard(mixed_weights, mesh, [fsdp.Stacked("layers")])
        params = fsdp.init_params(plan, jax.random.key(0))
        # Rests, and is updated, in float32 whatever it computes in.
        assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"float32"}
        states.append(trained(plan, mixed_loss, TX, params, tied_batch()))
    # bfloat16 weights: each rank's gradient is rounded to 2^-9 on its own.
    assert worst(host(states[0].params), host(states[1].params)) < 2e-2


def test_integers_are_no_parameters_and_come_back_as_they_were():
    plan = fsdp.fully_shard(mixed_weights, fsdp.make_mesh(), [fsdp.Stacked("layers")])
    assert "table" not in {param.name for param in plan.param_plans}
    state = fsdp.init_state(plan, TX, fsdp.init_params(plan, jax.random.key(0)))
    step = fsdp.make_train_step(plan, mixed_loss, TX)
    state, _ = step(state, tied_batch())
    np.testing.assert_array_equal(state.model_state["table"], np.arange(16))


def test_a_scalar_of_each_layer_is_replicated():
    plan = fsdp.fully_shard(mixed_weights, fsdp.make_mesh(), [fsdp.Stacked("layers")])
    (gain,) = [param for param in plan.param_plans if param.name == "layers.gain"]
    assert gain.split.dim is None


def test_dp_of_one_does_not_double_gradients():
    # A data axis of a single device, and microbatches: upstream once added twice.
    data, results = batch(rows=24), []
    for num_microbatches in (1, 3):
        plan = CASE.plan(one_device())
        params = CASE.sharded(plan)
        results.append(
            trained(
                plan, CASE.loss, TX, params, data, 1, num_microbatches=num_microbatches
            )
        )
    got, want = (host(state.params) for state in results)
    assert worst(got, want, without=CASE.zero_grads) < 1e-5
