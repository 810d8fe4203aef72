"""Units that are gathered ahead compute the same, and communicate the same bytes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.compare import host, worst
from helpers.errors import facts
from helpers.hlo import collectives, group_size
from jax.ad_checkpoint import checkpoint_name

import fsdp_jax as fsdp
from fsdp_jax._tree import named_leaves

pytestmark = pytest.mark.versions

WIDTH = 128
UNIT_BYTES = 4 * WIDTH * WIDTH


def make_weights(layers, dtype=jnp.float32):
    def make(key):
        up, down = jax.random.split(key)
        return {
            "layers": {
                "up": 0.3 * jax.random.normal(up, (layers, 16, 24), dtype),
                "down": 0.3 * jax.random.normal(down, (layers, 24, 16), dtype),
                "odd": jnp.ones((layers, 13), dtype),
                "gain": jnp.ones((layers,), dtype),
                "fixed": jnp.ones((layers, 16), dtype),
            },
            "encoder": jnp.ones((16, 16), dtype),
        }

    return make


def layer(w, carry, key, shift, encoded, segments):
    """All that may enter a unit: keys, slices, constants with and without gradient."""
    x, count = carry
    kept = jax.random.bernoulli(key, 0.9, x.shape)
    hidden = jnp.tanh(x @ w["up"]) @ w["down"].T.T * w["gain"] + w["odd"].sum()
    x = x + jnp.where(kept, hidden * w["fixed"][None], 0) + encoded + shift[None]
    x = jnp.where(segments[:, None] > 0, x, -x)
    return (x, count + 1), {"aux": (x**2).mean(), "index": count}


def loss_of(prefetch, unroll=1, *, layers):
    def loss(weights, batch, key):
        keys = jax.random.split(key, layers)
        encoded = jnp.tanh(batch["x"] @ weights["encoder"])
        shifts = jnp.linspace(0.0, 1.0, layers, dtype=encoded.dtype)
        shifts = shifts[:, None] * encoded.mean(0, keepdims=True)
        (x, count), ys = fsdp.scan(
            layer,
            weights["layers"],
            (batch["x"], jnp.int32(0)),
            xs=(keys, shifts),
            consts=(encoded, batch["segments"]),
            prefetch=prefetch,
            unroll=unroll,
        )
        ordered = (ys["index"] == jnp.arange(layers)).all()
        return jnp.mean((x - batch["y"]) ** 2) + 0.1 * ys["aux"].sum() * ordered

    return loss


def rows(dtype=np.float32):
    random = np.random.default_rng(0)
    batch = {name: random.normal(size=(24, 16)).astype(dtype) for name in "xy"}
    return batch | {"segments": np.arange(24) % 2}


def plan_of(layers, mesh=None, dtype=jnp.float32, **config):
    return fsdp.fully_shard(
        make_weights(layers, dtype),
        fsdp.make_mesh(**(mesh or {})),
        [fsdp.Stacked("layers")],
        fsdp.FSDPConfig(frozen=("layers.fixed",), **config),
    )


def computed(plan, prefetch, unroll=1, *, layers, num_microbatches=1, dtype=np.float32):
    params = fsdp.init_params(plan, jax.random.key(1))
    loss = loss_of(prefetch, unroll, layers=layers)
    compute = fsdp.value_and_grad(plan, loss, num_microbatches=num_microbatches)
    (value, _), grads = compute(params, rows(dtype), key=jax.random.key(2))
    return float(value), host(grads)


@pytest.fixture(scope="module", params=[1, 2, 3, 5])
def plain(request, fusion_emitters):
    """(layers, plan, loss and gradients without prefetching)."""
    plan = plan_of(request.param)
    return request.param, plan, computed(plan, 0, layers=request.param)


@pytest.mark.parametrize("prefetch", [1, 2])
def test_numbers_are_those_of_the_plain_scan_to_the_bit(plain, prefetch):
    layers, plan, (want_loss, want) = plain
    loss, grads = computed(plan, prefetch, layers=layers)
    assert loss == want_loss
    for (name, got), (_, expected) in zip(
        named_leaves(grads), named_leaves(want), strict=True
    ):
        np.testing.assert_array_equal(got, expected, err_msg=name)


def test_unrolled_numbers_differ_by_rounding_alone(plain):
    layers, plan, (want_loss, want) = plain
    loss, grads = computed(plan, 1, 2, layers=layers)
    assert abs(loss - want_loss) < 1e-6 * abs(want_loss)
    assert worst(grads, want) < 1e-6


@pytest.mark.parametrize(
    "name", ["nothing_saveable", "dots_saveable", "everything_saveable"]
)
def test_any_remat_policy_computes_the_same(name):
    policy = getattr(jax.checkpoint_policies, name)
    plan = plan_of(3, remat_policy=policy)
    want = computed(plan, 0, layers=3)
    loss, grads = computed(plan, 1, layers=3)
    assert abs(loss - want[0]) < 1e-6 * abs(want[0])
    assert worst(grads, want[1]) < 2e-6  # Recomputed values are fused otherwise.


@pytest.mark.parametrize(
    "mesh, config",
    [
        ({}, {"zero_dp_strategy": 0}),
        ({}, {"zero_dp_strategy": 2}),
        ({"dp_outer": 2}, {}),
        ({"dp_outer": 2}, {"outer_dp_sharding_strategy": 1}),
        ({"tp": 2}, {"tensor_parallel": {"layers.up": 1, "layers.down": 0}}),
    ],
    ids=["DDP", "ZeRO-2", "HSDP", "HFSDP", "tp"],
)
def test_every_strategy_computes_the_same_with_microbatches(mesh, config):
    with jax.enable_x64(True):
        plan = plan_of(3, mesh, np.float64, **config)
        options = {"layers": 3, "num_microbatches": 3, "dtype": np.float64}
        want = computed(plan, 0, **options)
        loss, grads = computed(plan, 1, **options)
    assert abs(loss - want[0]) < 1e-12
    assert worst(grads, want[1]) < 1e-12


def named(w, x):
    hidden = checkpoint_name(jnp.tanh(x @ w["up"]), "hidden")
    return x + checkpoint_name(hidden @ w["down"], "out"), None


POLICIES = {
    "named": jax.checkpoint_policies.save_only_these_names("hidden"),
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["out"],
        names_which_can_be_offloaded=["hidden"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_named_may_be_saved_or_offloaded_to_the_host(policy):
    def gradients(prefetch, remat_policy):
        def loss(weights, batch):
            x, _ = fsdp.scan(named, weights["layers"], batch["x"], prefetch=prefetch)
            return jnp.mean((x - batch["y"]) ** 2)

        plan = plan_of(3, remat_policy=remat_policy)
        params = fsdp.init_params(plan, jax.random.key(1))
        compute = fsdp.value_and_grad(plan, loss)
        return host(compute(params, rows())[1])

    want, got = gradients(0, None), gradients(1, POLICIES[policy])
    for (name, a), (_, b) in zip(named_leaves(got), named_leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7, err_msg=name)


def other(w, x):
    return x * jnp.tanh(x @ w["gate"]), None


def test_a_stack_may_be_followed_by_one_of_another_kind():
    def make(key):
        ours = make_weights(3)(key)["layers"]
        return {"dense": ours, "moe": {"gate": jnp.ones((2, 16, 16)) / 16}}

    def gradients(prefetch):
        def loss(weights, batch):
            scan = functools.partial(fsdp.scan, prefetch=prefetch)
            x, _ = scan(named, weights["dense"], batch["x"])
            x, _ = scan(other, weights["moe"], x)
            return jnp.mean((x - batch["y"]) ** 2)

        units = [fsdp.Stacked("dense"), fsdp.Stacked("moe")]
        plan = fsdp.fully_shard(make, fsdp.make_mesh(), units)
        params = fsdp.init_params(plan, jax.random.key(1))
        return host(fsdp.value_and_grad(plan, loss)(params, rows())[1])

    plain, ahead = gradients(0), gradients(1)
    for (name, a), (_, b) in zip(named_leaves(ahead), named_leaves(plain), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)


class Normed(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(16, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        return x + self.drop(jnp.tanh(self.norm(self.up(x))))


class NormedStack(nnx.Module):
    def __init__(self, rngs, prefetch):
        self.prefetch = prefetch
        self.layers = nnx.split_rngs(splits=3)(nnx.vmap(Normed))(rngs)

    def __call__(self, x):
        def run(layer, x):
            return layer(x), None

        return fsdp.scan(run, self.layers, x, prefetch=self.prefetch)[0]


@pytest.mark.parametrize("prefetch", [0, 1])
def test_what_nnx_modules_write_within_a_scan_is_there_afterwards(prefetch):
    def after_two_steps(prefetch):
        plan = fsdp.fully_shard(
            lambda key: NormedStack(nnx.Rngs(key), prefetch), fsdp.make_mesh(), [Normed]
        )
        tx = optax.sgd(0.1)
        step = fsdp.make_train_step(plan, lambda m, b: jnp.mean(m(b) ** 2), tx)
        state = fsdp.init_state(plan, tx, fsdp.init_params(plan, jax.random.key(0)))
        for _ in range(2):
            state, metrics = step(state, rows()["x"])
        return float(metrics["loss"]), dict(named_leaves(state.model_state))

    loss, state = after_two_steps(prefetch)
    assert np.all(state["layers.drop.rngs.count"] == 2)
    assert np.abs(state["layers.norm.mean"]).min() > 0
    if prefetch:
        plain_loss, plain = after_two_steps(0)
        assert loss == plain_loss
        np.testing.assert_array_equal(
            state["layers.norm.mean"], plain["layers.norm.mean"]
        )


def test_without_a_plan_the_units_run_as_they_are():
    weights = make_weights(3)(jax.random.key(1))
    results = [
        loss_of(prefetch, layers=3)(weights, rows(), jax.random.key(2))
        for prefetch in (0, 1)
    ]
    assert float(results[0]) == float(results[1])


# Programs


def square(w, x):
    return jnp.tanh(x @ w), None


def compiled(layers, prefetch, mesh=None, num_microbatches=1, **config):
    def loss(weights, batch):
        x, _ = fsdp.scan(square, weights["layers"], batch, prefetch=prefetch)
        return jnp.mean(x**2)

    plan = fsdp.fully_shard(
        lambda key: {"layers": jax.random.normal(key, (layers, WIDTH, WIDTH))},
        fsdp.make_mesh(**(mesh or {})),
        [fsdp.Stacked("layers")],
        fsdp.FSDPConfig(**config),
    )
    tx = optax.sgd(0.1)
    step = fsdp.make_train_step(plan, loss, tx, num_microbatches=num_microbatches)
    batch = jax.ShapeDtypeStruct((8 * num_microbatches, WIDTH), jnp.float32)
    return step.lower(fsdp.abstract_state(plan, tx), batch).compile()


@pytest.mark.parametrize("prefetch", [1, 2])
def test_each_unit_is_gathered_once_a_pass_and_its_gradient_reduced_once(prefetch):
    found = collectives(compiled(6, prefetch).as_text())
    gathers = [c for c in found if c.op == "all-gather"]
    # In each of the two loops one, and before the first one as many as are ahead: with
    # what is unsharded when that is through the second one begins.
    assert sum(c.depth == 1 for c in gathers) == 2
    assert sum(c.depth == 0 for c in gathers) == prefetch
    scatters = [c for c in found if c.op == "reduce-scatter"]
    assert sorted(c.depth for c in scatters) == [0, 1]  # the first unit's comes last


def test_replicas_are_reduced_in_the_loop_as_well():
    found = collectives(compiled(6, 1, {"dp_outer": 2}, num_microbatches=3).as_text())
    outer = [c for c in found if c.op == "all-reduce" and group_size(c.groups) == 2]
    assert sorted(c.depth for c in outer if c.size > 1) == [0, 1]


@pytest.fixture
def all_optimizations():
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


def units(layers, prefetch, **config):
    """Temporaries of a step, in whole units."""
    memory = compiled(layers, prefetch, **config).memory_analysis()
    return memory.temp_size_in_bytes / UNIT_BYTES


@pytest.mark.parametrize("prefetch", [1, 2])
def test_no_more_units_are_unsharded_than_are_ahead(prefetch, all_optimizations):
    few, many = (units(n, prefetch) for n in (4, 32))
    plain_few, plain_many = (units(n, 0) for n in (4, 32))
    # Besides those ahead, in backward the gradients of one unit that are not reduced,
    # and where more than one is ahead, a copy as they move up.
    bound = prefetch + 1 + (prefetch > 1) + 0.25
    assert few - plain_few < bound
    assert many - plain_many < bound
    assert abs((many - few) - (plain_many - plain_few)) < 0.1


# Refusals


def test_what_is_kept_for_backward_is_not_gathered_ahead():
    with pytest.raises(
        ValueError, match=facts("'layers'", "reshard_after_forward=False", "prefetch=0")
    ):
        compiled(4, 1, reshard_after_forward=False)


def test_units_within_a_unit_are_refused():
    inner = fsdp.unit(square)

    def outer(w, x):
        return inner(w["inner"], x @ w["own"])[0], None

    def make(key):
        return {"layers": {"own": jnp.ones((3, 8, 8)), "inner": jnp.ones((3, 8, 8))}}

    plan = fsdp.fully_shard(
        make, fsdp.make_mesh(), [fsdp.Stacked("layers"), fsdp.Stacked("layers.inner")]
    )

    def loss(weights, x):
        return fsdp.scan(outer, weights["layers"], x, prefetch=1)[0].mean()

    params = fsdp.init_params(plan, jax.random.key(0))
    with pytest.raises(
        ValueError, match=facts("'layers'", "'layers.inner'", "prefetch=0")
    ):
        fsdp.value_and_grad(plan, loss)(params, np.ones((8, 8), np.float32))


@pytest.mark.parametrize("options", [{"prefetch": -1}, {"unroll": 0}], ids=str)
def test_numbers_of_units_that_cannot_be_are_refused(options):
    with pytest.raises(
        ValueError,
        match=facts(
            "fsdp.scan", *(f"{name}={number}" for name, number in options.items())
        ),
    ):
        fsdp.scan(square, jnp.ones((3, 8, 8)), jnp.ones((8, 8)), **options)


@pytest.mark.parametrize("unit", ["layers", fsdp.Stacked("layers", num_dims=2)])
def test_what_is_no_stack_of_one_dim_is_not_gathered_ahead(unit):
    plan = fsdp.fully_shard(
        lambda key: {"layers": jnp.ones((3, 8, 8, 8))}, fsdp.make_mesh(), [unit]
    )

    def loss(weights, x):
        return fsdp.scan(square, weights["layers"], x, prefetch=1)[0].mean()

    params = fsdp.init_params(plan, jax.random.key(0))
    with pytest.raises(ValueError, match=facts("'layers'", "prefetch=0")):
        fsdp.value_and_grad(plan, loss)(params, np.ones((8, 8), np.float32))
