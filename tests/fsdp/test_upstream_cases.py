"""Cases of Megatron-LM's own tests that no other test here has; see UPSTREAM.md."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.compare import host, worst
from helpers.compiles import compilations
from helpers.hlo import collectives
from jax.sharding import AxisType

import fsdp_jax as fsdp
from fsdp_jax._tree import named_leaves
from fsdp_jax.sharding._chunks import chunks
from fsdp_jax.sharding._mesh import AXES
from fsdp_jax.sharding._plan import ROOT

TX = optax.adam(1e-2)
EMBED, MLP, OUT, ROWS, LAYERS = 13, 52, 17, 16, 3  # upstream's odd sizes
RNG = np.random.default_rng(0)
BATCH = {
    "x": RNG.normal(size=(ROWS, EMBED)).astype(np.float32),
    "y": RNG.normal(size=(ROWS, OUT)).astype(np.float32),
}


class Perceptron(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(EMBED, MLP, rngs=rngs)
        self.down = nnx.Linear(MLP, OUT, rngs=rngs)

    def __call__(self, x):
        return self.down(jax.nn.relu(self.up(x)))


def perceptron(key):
    return Perceptron(nnx.Rngs(key))


def error(model, batch):
    out = model(batch["x"])
    return jnp.mean((out - batch["y"]) ** 2), out


def one_device():
    return fsdp.make_mesh(devices=jax.devices()[:1])


def assert_same_bits(got, want):
    for (name, a), (_, b) in zip(named_leaves(got), named_leaves(want), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)


# Meshes


@pytest.mark.parametrize("size", [2, 8])
def test_a_mesh_made_by_hand_trains_to_the_same_bits(size):
    devices, auto = jax.devices()[:size], (AxisType.Auto,) * 6
    sizes = (1, 1, size, 1, 1, 1)
    by_hand = jax.make_mesh(sizes, AXES, axis_types=auto, devices=devices)
    tx, results = optax.adam(3.0), []
    for mesh in (fsdp.make_mesh(devices=devices), by_hand):
        plan = fsdp.fully_shard(perceptron, mesh, [nnx.Linear])
        step = fsdp.make_train_step(plan, error, tx, has_aux=True)
        state = fsdp.init_state(plan, tx, fsdp.init_params(plan, jax.random.key(0)))
        state, metrics = step(state, BATCH)
        results.append(host((metrics, fsdp.unshard(state.params))))
    assert_same_bits(*results)


def test_shards_over_two_axes_count_the_inner_axis_first():
    # Device (outer, inner) starts at inner * size / 4 + outer * size / 8.
    plan = fsdp.fully_shard(
        lambda key: {"w": jnp.ones((24, 3))},
        fsdp.make_mesh(dp_outer=2),
        config=fsdp.FSDPConfig(outer_dp_sharding_strategy=1),
    )
    start = {chunk.device: chunk.offsets[0] for chunk in chunks(plan.params["w"])}
    devices = plan.mesh.devices.reshape(2, 4)
    for outer, inner in np.ndindex(2, 4):
        assert start[devices[outer, inner]] == inner * 24 // 4 + outer * 24 // 8


@pytest.mark.parametrize("strategy", [0, 1, 3])
def test_one_device_communicates_nothing(strategy):
    plan = fsdp.fully_shard(
        perceptron,
        one_device(),
        [nnx.Linear],
        fsdp.FSDPConfig(zero_dp_strategy=strategy),
    )
    tx = optax.sgd(0.1)
    step = fsdp.make_train_step(plan, error, tx, has_aux=True, num_microbatches=2)
    lowered = step.lower(fsdp.abstract_state(plan, tx), BATCH)
    assert [c for c in collectives(lowered.compile().as_text()) if c.size > 1] == []


# Models


class Rooted(nnx.Module):
    """Parameters of the root itself, beside a unit."""

    def __init__(self, rngs):
        self.scale = nnx.Param(jnp.arange(16.0))
        self.matrix = nnx.Param(jnp.arange(256.0).reshape(16, 16))
        self.inner = nnx.Linear(16, 16, use_bias=False, rngs=rngs)
        self.inner.kernel[...] = jnp.eye(16)

    def __call__(self, x):
        assert self.scale[...].shape == (16,)
        return self.inner(x * self.scale[...][None]) @ self.matrix[...]


def test_parameters_of_the_root_are_unsharded_in_its_forward():
    plan = fsdp.fully_shard(
        lambda key: Rooted(nnx.Rngs(key)), fsdp.make_mesh(), [nnx.Linear]
    )
    assert all(param.split.dim is not None for param in plan.param_plans)
    x = np.arange(ROWS * 16, dtype=np.float32).reshape(ROWS, 16) % 7
    evaluate = fsdp.make_eval_step(
        plan, lambda model, x: (model(x).mean(), model(x)), has_aux=True
    )
    got = evaluate(fsdp.init_params(plan, jax.random.key(0)), x)["aux"]
    # Of integers below 2^24: exact in any order.
    want = (x * np.arange(16)) @ np.arange(256).reshape(16, 16)
    np.testing.assert_array_equal(got, want)


class Parent(nnx.Module):
    """A unit whose parameters all belong to units within."""

    def __init__(self, rngs):
        self.first = nnx.Linear(16, 16, rngs=rngs)
        self.second = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


class Grandparent(nnx.Module):
    def __init__(self, rngs):
        self.parent = Parent(rngs)

    def __call__(self, x):
        return self.parent(x)


class Convolutions(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Conv(3, 16, (3, 3), rngs=rngs)
        self.second = nnx.Conv(16, 5, (3, 3), strides=2, rngs=rngs)

    def __call__(self, x):
        images = jnp.tanh(x).reshape(len(x), 4, 4, 3)
        return self.second(jax.nn.relu(self.first(images))).reshape(len(x), -1)


@pytest.mark.parametrize(
    "cls, units, width",
    [(Grandparent, [Parent, nnx.Linear], 16), (Convolutions, [nnx.Conv], 48)],
    ids=["a unit without parameters", "convolutions"],
)
def test_models_of_every_shape_train_as_on_one_device(cls, units, width):
    x, results = RNG.normal(size=(ROWS, width)).astype(np.float32), []
    for mesh, outer in ((fsdp.make_mesh(dp_outer=2), 1), (one_device(), 0)):
        plan = fsdp.fully_shard(
            lambda key: cls(nnx.Rngs(key)),
            mesh,
            units,
            fsdp.FSDPConfig(outer_dp_sharding_strategy=outer),
        )
        tx = optax.sgd(0.5)
        step = fsdp.make_train_step(plan, lambda m, x: jnp.mean(m(x) ** 2), tx)
        state = fsdp.init_state(plan, tx, fsdp.init_params(plan, jax.random.key(0)))
        for _ in range(2):
            state, _ = step(state, x)
        results.append(host(fsdp.unshard(state.params)))
    assert worst(*results) < 1e-5


# Steps


@pytest.mark.parametrize("outer", [0, 1], ids=["FSDP", "HFSDP"])
def test_one_program_runs_every_step_and_the_loss_falls(outer):
    plan = fsdp.fully_shard(
        perceptron,
        fsdp.make_mesh(dp_outer=1 + outer),
        [nnx.Linear],
        fsdp.FSDPConfig(outer_dp_sharding_strategy=outer),
    )
    step = fsdp.make_train_step(plan, error, TX, has_aux=True, num_microbatches=2)
    state = fsdp.init_state(plan, TX, fsdp.init_params(plan, jax.random.key(0)))
    state, first = step(state, BATCH)
    seen = [first]
    with compilations() as heard:
        for _ in range(7):
            state, metrics = step(state, BATCH)
            seen.append(metrics)
    assert heard == []
    assert all(0 < metrics["grad_norm"] < np.inf for metrics in seen)
    losses = [float(metrics["loss"]) for metrics in seen]
    assert all(
        after < before for before, after in zip(losses, losses[1:], strict=False)
    )


def test_each_forward_sees_the_weights_that_the_update_before_it_made():
    def loss(weights, batch):
        return weights["w"].sum() * batch.mean()

    plan = fsdp.fully_shard(lambda key: {"w": jnp.ones((8, 2))}, fsdp.make_mesh())
    tx = optax.sgd(0.25)
    step, evaluate = (
        fsdp.make_train_step(plan, loss, tx),
        fsdp.make_eval_step(plan, loss),
    )
    state = fsdp.init_state(plan, tx, fsdp.init_params(plan, jax.random.key(0)))
    rows = np.full(8, 2, np.float32)
    for updates in range(4):  # A gradient of 2 takes half of each weight's first value.
        want = 2 * 16 * (1 - updates / 2)
        assert evaluate(state.params, rows)["loss"] == want
        state, metrics = step(state, rows)
        assert metrics["loss"] == want


def test_gradients_of_two_calls_add_up():
    # Upstream: ranks with gradient rank + 1, called twice, have W + 1.
    def loss(weights, batch):
        return weights["w"].sum() * batch.mean()

    plan = fsdp.fully_shard(lambda key: {"w": jnp.ones((8, 2))}, fsdp.make_mesh())
    params = fsdp.init_params(plan, jax.random.key(0))
    compute = fsdp.value_and_grad(plan, loss)
    rows = np.arange(1, 9, dtype=np.float32)
    _, first = compute(params, rows)
    _, second = compute(params, rows[::-1].copy())
    np.testing.assert_array_equal(first["w"] + second["w"], np.full((8, 2), 9))


def layer(w, x):
    return x + jnp.tanh(x @ w["up"] + w["bias"][None]) @ w["down"], None


def make_stack(key):
    up, down = jax.random.split(key)
    return {
        "up": 0.3 * jax.random.normal(up, (LAYERS, EMBED, MLP), "float32"),
        "bias": jnp.zeros((LAYERS, MLP), "float32"),
        "down": 0.3 * jax.random.normal(down, (LAYERS, MLP, EMBED), "float32"),
    }


def stack_loss(weights, batch):
    return jnp.mean(fsdp.scan(layer, weights, batch["x"])[0] ** 2)


def train_stack(steps=2, mesh=None, num_microbatches=1, tx=TX, **config):
    """(losses, state, step) of a stack, by default on two replicas."""
    plan = fsdp.fully_shard(
        make_stack,
        mesh or fsdp.make_mesh(dp_outer=2),
        [fsdp.Stacked("*")],
        fsdp.FSDPConfig(**config),
    )
    step = fsdp.make_train_step(plan, stack_loss, tx, num_microbatches=num_microbatches)
    state, losses = (
        fsdp.init_state(plan, tx, fsdp.init_params(plan, jax.random.key(0))),
        [],
    )
    for _ in range(steps):
        state, metrics = step(state, BATCH)
        losses.append(float(metrics["loss"]))
    return losses, state, step


def whole(state):
    """(parameters, optimizer state) on the host, without what pads them."""
    return host(fsdp.unshard((state.params, state.opt_state)))


@pytest.fixture(scope="module")
def by_default(fusion_emitters):
    losses, state, _ = train_stack(num_microbatches=2)
    return host((losses, fsdp.unshard(state.params)))


@pytest.mark.parametrize(
    "option",
    [
        {"reshard_after_forward": False},
        {"remat_policy": jax.checkpoint_policies.nothing_saveable},
        {"overlap_outer": False},
    ],
    ids=lambda option: next(iter(option)),
)
def test_options_that_move_work_leave_the_bits_as_they_are(option, by_default):
    losses, state, _ = train_stack(num_microbatches=2, **option)
    assert_same_bits(host((losses, fsdp.unshard(state.params))), by_default)


def test_a_frozen_first_half_stays_under_zero_2():
    def make(key):
        return {"first": make_stack(key), "second": make_stack(key)}

    def loss(weights, batch):
        x, _ = fsdp.scan(layer, weights["first"], batch["x"])
        return jnp.mean(fsdp.scan(layer, weights["second"], x)[0] ** 2)

    plan = fsdp.fully_shard(
        make,
        fsdp.make_mesh(),
        [fsdp.Stacked("first"), fsdp.Stacked("second")],
        fsdp.FSDPConfig(zero_dp_strategy=2, frozen=("first",)),
    )
    step = fsdp.make_train_step(plan, loss, TX)
    state = fsdp.init_state(plan, TX, fsdp.init_params(plan, jax.random.key(0)))
    before = host(fsdp.unshard(state.params))
    for _ in range(2):
        state, _ = step(state, BATCH)
    after = host(fsdp.unshard(state.params))
    assert_same_bits(after["first"], before["first"])
    for name, leaf in named_leaves(after["second"]):
        assert (leaf != before["second"][name]).any(), name


def test_a_frozen_norm_is_no_error_where_others_are_split_over_tp():
    def make(key):
        up, down = jax.random.split(key)
        return {
            "norm": jnp.full(16, 0.5),
            "up": 0.3 * jax.random.normal(up, (16, 64)),
            "down": 0.3 * jax.random.normal(down, (64, 16)),
        }

    def loss(weights, x):
        hidden = jnp.tanh((x * weights["norm"][None]) @ weights["up"])
        return jnp.mean((hidden @ weights["down"]) ** 2)

    x, results = RNG.normal(size=(ROWS, 16)).astype(np.float32), []
    for mesh, rules in (
        (fsdp.make_mesh(tp=2), {"up": 1, "down": 0}),
        (one_device(), {}),
    ):
        config = fsdp.FSDPConfig(frozen=("norm",), tensor_parallel=rules)
        plan = fsdp.fully_shard(make, mesh, config=config)
        tx = optax.sgd(0.5)
        step = fsdp.make_train_step(plan, loss, tx)
        state = fsdp.init_state(plan, tx, fsdp.init_params(plan, jax.random.key(0)))
        for _ in range(2):
            state, _ = step(state, x)
        results.append(host(fsdp.unshard(state.params)))
    assert worst(*results) < 1e-5
    assert (results[0]["norm"] == 0.5).all()


def test_scopes_name_units_within_units():
    def outer(w, x):
        inner = fsdp.unit(lambda w, x: jnp.tanh(x @ w))
        return inner(w["inner"], x @ w["own"])

    def loss(weights, x):
        return jnp.mean(fsdp.unit(outer)(weights["outer"], x) ** 2)

    def make(key):
        return {"outer": {"inner": jnp.ones((16, 16)), "own": jnp.ones((16, 16))}}

    units = ["outer", "outer.inner"]
    plan = fsdp.fully_shard(make, fsdp.make_mesh(), units)
    tx = optax.sgd(0.1)
    step = fsdp.make_train_step(plan, loss, tx)
    rows = jax.ShapeDtypeStruct((ROWS, 16), jnp.float32)
    text = step.lower(fsdp.abstract_state(plan, tx), rows).compile().as_text()
    for op in (" all-gather(", " reduce-scatter("):
        lines = [line for line in text.splitlines() if op in line]
        innermost = {re.findall(r"unit:([\w.]+)", line)[-1] for line in lines}
        assert innermost == set(units)


# Precisions


@pytest.mark.parametrize("inner, outer", [(1, 0), (3, 1)])
def test_main_weights_may_be_float64_above_a_model_of_float32(inner, outer):
    policy = fsdp.MixedPrecisionPolicy(
        main_params_dtype=np.float64, main_grads_dtype=np.float32
    )
    with jax.enable_x64(True):
        _, state, _ = train_stack(
            steps=1,
            zero_dp_strategy=inner,
            outer_dp_sharding_strategy=outer,
            mp_policy=policy,
        )
        leaves = jax.tree.leaves(state.params)
        assert {leaf.dtype for leaf in leaves} == {np.dtype(np.float64)}
        # Finer than float32: an update was not rounded to what the model computes in.
        up = whole(state)[0]["up"]
    assert (up != up.astype(np.float32)).any()


def test_adam_in_bfloat16_is_that_of_one_device():
    policy = fsdp.MixedPrecisionPolicy(
        param_dtype=jnp.bfloat16, main_params_dtype=jnp.bfloat16
    )
    # An eps above rounding: a gradient of about zero must not make a whole step.
    got, want = (
        train_stack(4, mesh, tx=optax.adam(1e-2, eps=1e-2), mp_policy=policy)[1]
        for mesh in (fsdp.make_mesh(), one_device())
    )
    for (name, a), (_, b) in zip(
        named_leaves(host(fsdp.unshard(got.params))),
        named_leaves(host(want.params)),
        strict=True,
    ):
        assert a.dtype == b.dtype == jnp.bfloat16
        a, b = a.astype(np.float32), b.astype(np.float32)
        np.testing.assert_allclose(a, b, atol=3e-3, rtol=2**-7, err_msg=name)


def test_adam_takes_gradients_narrower_than_the_weights():
    policy = fsdp.MixedPrecisionPolicy(main_grads_dtype=jnp.bfloat16)
    losses, state, _ = train_stack(3, mp_policy=policy)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.params)} == {"float32"}
    assert losses[2] < losses[1] < losses[0]


# Arrays


SHAPES = {
    "few rows more": (26, 3),  # 3 * 8 + 2
    "one column more": (5, 17),  # 2 * 8 + 1
    "both dims odd": (13, 15),
    "fewer than devices": (3,),
    "three dims": (3, 5, 7),
    "even": (16, 24),
    "large": (1024, 512),
    "one element": (1,),
}


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("outer", [0, 1], ids=["8", "2 x 4"])
def test_uneven_arrays_are_gathered_to_the_bit(dtype, outer):
    values = {n: RNG.normal(size=s).astype(dtype) for n, s in SHAPES.items()}
    policy = fsdp.MixedPrecisionPolicy(main_params_dtype=dtype)
    with jax.enable_x64(True):
        plan = fsdp.fully_shard(
            lambda key: jax.tree.map(jnp.asarray, values),
            fsdp.make_mesh(dp_outer=1 + outer),
            config=fsdp.FSDPConfig(mp_policy=policy, outer_dp_sharding_strategy=outer),
        )
        assert {
            param.name for param in plan.param_plans if param.split.dim is None
        } == {"one element"}
        params = fsdp.init_params(plan, jax.random.key(0))
        state = fsdp.init_state(plan, optax.sgd(0.1), params)
        gathered = fsdp.unshard(state.params)
        for name, value in values.items():
            for shard in gathered[name].addressable_shards:
                np.testing.assert_array_equal(shard.data, value, err_msg=name)


@pytest.mark.parametrize(
    "inner, outer, dtype",
    [(0, 0, "float32"), (1, 0, "bfloat16"), (2, 0, "float32"), (3, 1, "bfloat16")],
)
def test_every_strategy_goes_on_from_its_checkpoint_to_the_bit(
    inner, outer, dtype, tmp_path
):
    policy = fsdp.MixedPrecisionPolicy(main_params_dtype=dtype)
    _, state, step = train_stack(
        1, zero_dp_strategy=inner, outer_dp_sharding_strategy=outer, mp_policy=policy
    )
    fsdp.save(tmp_path, state)
    saved = whole(state)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(saved[0])} == {dtype}
    loaded = fsdp.load(tmp_path, fsdp.abstract_state(step.plan, TX))
    assert_same_bits(whole(loaded), saved)
    elsewhere = fsdp.fully_shard(
        make_stack,
        fsdp.make_mesh(devices=jax.devices()[:4]),
        [fsdp.Stacked("*")],
        fsdp.FSDPConfig(mp_policy=policy),
    )
    moved = fsdp.load(tmp_path, fsdp.abstract_state(elsewhere, TX))
    assert_same_bits(whole(moved), saved)
    # The next step's loss is that of the weights saved; its update has all the rest.
    (after, metrics), (want, want_metrics) = step(loaded, BATCH), step(state, BATCH)
    assert metrics["loss"] == want_metrics["loss"]
    assert_same_bits(whole(after), whole(want))


class MixedLayers(nnx.Module):
    """Layers of a unit's class, of a subclass of it, and of another class."""

    def __init__(self, rngs: nnx.Rngs):
        self.conv = nnx.Conv(8, 8, kernel_size=(3,), rngs=rngs)
        self.inner = nnx.Linear(8, 16, rngs=rngs)
        self.sub = OwnLinear(16, 8, rngs=rngs)

    def __call__(self, x):
        return self.sub(self.inner(self.conv(x)))


class OwnLinear(nnx.Linear):
    """Found by the class it derives from."""


def test_a_unit_is_every_object_of_its_class_and_nothing_else():
    plan = fsdp.fully_shard(
        lambda key: MixedLayers(nnx.Rngs(key)), fsdp.make_mesh(), [nnx.Linear]
    )
    assert {param.name: param.unit for param in plan.param_plans} == {
        "conv.kernel": ROOT,
        "conv.bias": ROOT,
        "inner.kernel": "inner",
        "inner.bias": "inner",
        "sub.kernel": "sub",
        "sub.bias": "sub",
    }
    none = fsdp.fully_shard(
        lambda key: MixedLayers(nnx.Rngs(key)), fsdp.make_mesh(), [OwnLinear]
    )
    assert {param.unit for param in none.param_plans} == {ROOT, "sub"}
