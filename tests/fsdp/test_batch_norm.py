"""BatchNorm of flax.nnx, linen and equinox trains on two devices as on one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from helpers.errors import facts

import fsdp_jax as fsdp

RANKS, WIDTH, STEPS = 2, 64, 3
# float64: what differs is the order of sums.
TOLERANCE = 1e-9
# The ranks' rows differ in their mean and variance, as do a rank's microbatches.
X = np.random.default_rng(0).normal(size=(16, WIDTH))
X = X * np.linspace(0.5, 2, 16)[:, None] + np.linspace(-1, 1, 16)[:, None]


@pytest.fixture(scope="module", autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def in_float64(tree):
    def wide(x):
        is_float = eqx.is_array(x) and jnp.issubdtype(x.dtype, jnp.floating)
        return x.astype(jnp.float64) if is_float else x

    return jax.tree.map(wide, tree)


def error(y):
    return jnp.mean((y - 1) ** 2)


class NNXBlock(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.9, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.norm(self.linear(x)))


class NNXNet(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([NNXBlock(rngs) for _ in range(2)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def make_nnx(key):
    net = NNXNet(nnx.Rngs(key))
    nnx.update(net, in_float64(nnx.state(net)))
    return net


def nnx_loss(net, x):
    return error(net(x))


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.Dense(WIDTH)(x)
        x = jnp.tanh(linen.BatchNorm(use_running_average=False, momentum=0.9)(x))
        self.sow("losses", "balance", jnp.mean(x**4))
        return x


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x):
        return LinenBlock(name="b1")(LinenBlock(name="b0")(x))


def make_linen(key):
    variables = in_float64(LinenNet().init(key, X[:2]))
    return {name: variables[name] for name in ("params", "batch_stats")}


def linen_loss(variables, x):
    mutable = ["batch_stats", "losses"]
    y, new = LinenNet().apply(variables, x, mutable=mutable)
    balance = sum(jax.tree.leaves(new.pop("losses")))
    return error(y) + 0.1 * balance, fsdp.step.UpdatedModel(new)


class EqxBlock(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm

    def __init__(self, key):
        self.linear = eqx.nn.Linear(WIDTH, WIDTH, key=key)
        self.norm = eqx.nn.BatchNorm(WIDTH, "rows", momentum=0.9, mode="batch")

    def __call__(self, x, state):
        x, state = self.norm(self.linear(x), state)
        return jnp.tanh(x), state


class EqxNet(eqx.Module):
    blocks: list[EqxBlock]

    def __init__(self, key):
        self.blocks = [EqxBlock(key) for key in jax.random.split(key)]

    def __call__(self, x, state):
        for block in self.blocks:
            x, state = block(x, state)
        return x, state


def make_eqx(key):
    return eqx.nn.make_with_state(EqxNet)(key)


def eqx_loss(model_and_state, x):
    model, state = model_and_state
    axes: dict[str, Any] = {"in_axes": (0, None), "out_axes": (0, None)}
    y, state = jax.vmap(model, axis_name="rows", **axes)(x, state)
    return error(y), fsdp.step.UpdatedModel((model, state))


class Case(NamedTuple):
    make: Callable[..., Any]
    loss: Callable[..., Any]
    units: tuple[Any, ...]


CASES = {
    "nnx": Case(make_nnx, nnx_loss, (NNXBlock,)),
    "linen": Case(make_linen, linen_loss, ("params.b*",)),
    "equinox": Case(make_eqx, eqx_loss, (EqxBlock,)),
}


def plan_of(case, units, **config):
    mesh = fsdp.make_mesh(devices=jax.devices()[:RANKS])
    return fsdp.fully_shard(case.make, mesh, units, fsdp.FSDPConfig(**config))


def train(plan, case, num_microbatches):
    """The loss of the last step, parameters, and the model's other arrays."""
    tx = optax.sgd(0.1)
    state = fsdp.init_state(plan, tx, fsdp.init_params(plan, jax.random.key(0)))
    step = fsdp.make_train_step(plan, case.loss, tx, num_microbatches=num_microbatches)
    losses = []
    for _ in range(STEPS):
        state, metrics = step(state, X)
        losses.append(metrics["loss"])
    return losses[-1], fsdp.unshard(state.params), state.model_state


def train_plainly(plan, case, groups, mean_of=1):
    """The same with jax and optax alone.

    Args:
      plan: To take the model apart; nothing of it is sharded here.
      case: The model.
      groups: Rows of each forward pass.
      mean_of: How many of the passes start from one state, of which the mean is taken.
    """
    model = plan.model
    params, state = model.split(case.make(jax.random.key(0)))

    @jax.jit
    def run(params, state, x):
        def loss(params):
            whole = model.merge(params, state)
            out = case.loss(whole, x)
            if isinstance(whole, nnx.Module):
                return out, model.split(whole)[1]
            new = out[1].model
            new = {**whole, **new} if isinstance(new, dict) else new
            return out[0], model.split(new)[1]

        return jax.value_and_grad(loss, has_aux=True)(params)

    def mean(trees):
        # Counters of integers, which are equal, stay integers.
        return jax.tree.map(lambda *x: jnp.mean(jnp.stack(x), 0, x[0].dtype), *trees)

    losses = []
    for _ in range(STEPS):
        states, losses, grads = [], [], []
        for number, x in enumerate(groups):
            (loss, new), grad = run(params, state, x)
            losses.append(loss)
            grads.append(grad)
            states.append(new)
            if number % mean_of == mean_of - 1:
                state, states = mean(states), []
        grad = mean(grads)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grad)
    return mean(losses), params, state


def microbatches(num_microbatches):
    """Rows of each microbatch, `[num_microbatches, rank, rows, width]`."""
    return X.reshape(RANKS, num_microbatches, -1, WIDTH).swapaxes(0, 1)


def assert_same(got, want):
    got, want = (fsdp.sharding.named_leaves(tree) for tree in (got, want))
    for (name, a), (_, b) in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, TOLERANCE, TOLERANCE, err_msg=name)


@pytest.mark.parametrize("in_units, num_microbatches", [(True, 2), (False, 1)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_statistics_are_those_of_all_rows_of_a_microbatch(
    name, in_units, num_microbatches
):
    case = CASES[name]
    plan = plan_of(case, case.units if in_units else ())
    rows = microbatches(num_microbatches).reshape(num_microbatches, -1, WIDTH)
    assert_same(train(plan, case, num_microbatches), train_plainly(plan, case, rows))


@pytest.mark.parametrize("name", ["linen", "equinox"])  # nnx: see test_units.py
def test_on_request_statistics_are_those_of_the_ranks_own_rows(name):
    case = CASES[name]
    plan = plan_of(case, case.units, sync_batch_norm=False)
    rows = microbatches(1)[0]
    want = train_plainly(plan, case, rows, mean_of=RANKS)
    assert_same(train(plan, case, 1), want)


@pytest.mark.parametrize("name", CASES)
def test_the_audit_knows_the_statistics_that_are_communicated(name):
    case = CASES[name]
    plan, tx = plan_of(case, case.units), optax.sgd(0.1)
    step = fsdp.make_train_step(plan, case.loss, tx)
    fsdp.audit_step(plan, step.lower(fsdp.abstract_state(plan, tx), X))


def masked_linen():
    norm = linen.BatchNorm(use_running_average=False)

    def loss(variables, x):
        return jnp.mean(norm.apply(variables, x, mask=x > 0, mutable=True)[0])

    return Case(lambda key: norm.init(key, X), loss, ())


def masked_nnx():
    def make(key):
        return nnx.BatchNorm(WIDTH, rngs=nnx.Rngs(key))

    return Case(make, lambda norm, x: jnp.mean(norm(x, mask=x > 0)), ())


@pytest.mark.parametrize("masked", [masked_linen, masked_nnx])
def test_a_mask_is_refused_where_ranks_may_have_unequal_shares(masked):
    case = masked()
    plan = plan_of(case, ())
    state = fsdp.init_state(
        plan, optax.sgd(0.1), fsdp.init_params(plan, jax.random.key(0))
    )
    compute = fsdp.value_and_grad(plan, case.loss)
    with pytest.raises(
        ValueError, match=facts("mask=...", "dp_shard", "sync_batch_norm=False")
    ):
        compute(state.params, X, model_state=state.model_state)


def test_what_does_not_fit_the_models_arrays_is_refused():
    case = CASES["linen"]
    plan = plan_of(case, case.units)
    state = fsdp.init_state(
        plan, optax.sgd(0.1), fsdp.init_params(plan, jax.random.key(0))
    )

    def loss_with(new):
        def loss(variables, x):
            y, _ = LinenNet().apply(variables, x, mutable=["batch_stats"])
            return error(y), fsdp.step.UpdatedModel(new)

        return loss

    def narrow(variables):
        return jax.tree.map(lambda x: jnp.zeros(3, x.dtype), variables)

    wrong = {"cache": {"h": jnp.zeros(2)}}, {}, narrow(state.model_state)
    says = ("cache.h",), ("UpdatedModel",), ("b0.BatchNorm_0.mean", "float64[3]")
    for new, match in zip(wrong, says, strict=True):
        compute = fsdp.value_and_grad(plan, loss_with(new))
        with pytest.raises(ValueError, match=facts(*match)):
            compute(state.params, X, model_state=state.model_state)


@pytest.mark.parametrize("name", ["linen", "equinox"])
def test_new_statistics_as_aux_are_refused_by_name(name):
    case = CASES[name]
    plan = plan_of(case, case.units)
    state = fsdp.init_state(
        plan, optax.sgd(0.1), fsdp.init_params(plan, jax.random.key(0))
    )

    def loss(model, x):
        value, new = case.loss(model, x)
        return value, new.model

    compute = fsdp.value_and_grad(plan, loss, has_aux=True)
    match = {"linen": ("UpdatedModel", "batch_stats"), "equinox": ("UpdatedModel", 1)}
    with pytest.raises(ValueError, match=facts(*match[name])):
        compute(state.params, X, model_state=state.model_state)


def test_an_nnx_module_needs_no_updated_model():
    def loss(net, x):
        return nnx_loss(net, x), fsdp.step.UpdatedModel(net)

    plan = plan_of(CASES["nnx"], ())
    state = fsdp.init_state(
        plan, optax.sgd(0.1), fsdp.init_params(plan, jax.random.key(0))
    )
    compute = fsdp.value_and_grad(plan, loss)
    with pytest.raises(ValueError, match=facts("UpdatedModel", "NNXNet")):
        compute(state.params, X, model_state=state.model_state)


class Averaging(eqx.Module):
    """Writes a constant into its state: that its first call was made."""

    norm: eqx.nn.BatchNorm

    def __init__(self):
        self.norm = eqx.nn.BatchNorm(WIDTH, "rows", momentum=0.9, mode="ema")

    def __call__(self, x, state):
        return self.norm(x, state)


def test_a_state_takes_a_constant_as_on_one_device():
    def make(key):
        del key
        return eqx.nn.make_with_state(Averaging)()

    mesh = fsdp.make_mesh(devices=jax.devices()[:RANKS])
    plan = fsdp.fully_shard(make, mesh)
    params = fsdp.init_params(plan, jax.random.key(0))
    _, state = plan.model.split(make(None))
    compute = fsdp.value_and_grad(plan, eqx_loss)
    (loss, _, written), _ = compute(params, X, model_state=state)
    want, updated = eqx_loss(make(None), X)
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    leaves = zip(*map(jax.tree.leaves, (written, updated.model[1])), strict=True)
    for got, new in leaves:
        np.testing.assert_allclose(got, new, rtol=1e-5)


def test_statistics_of_the_shape_of_a_gradient_are_no_gradients_to_the_audit():
    def make_model(key):
        return nnx.BatchNorm(WIDTH, rngs=nnx.Rngs(key))

    def loss_fn(model, x):
        return jnp.mean(model(x) ** 2)

    # Under ZeRO-1 with small parameters the gradients of scale and bias are all-reduced
    # once, as are the running mean and variance of the same shape.
    config = fsdp.FSDPConfig(
        zero_dp_strategy=1, min_shard_elements=2 * WIDTH, sync_batch_norm=False
    )
    mesh = fsdp.make_mesh(devices=jax.devices()[:RANKS])
    plan = fsdp.fully_shard(make_model, mesh, config=config)
    tx = optax.sgd(0.1)
    step = fsdp.make_train_step(plan, loss_fn, tx, num_microbatches=2)
    program = step.lower(fsdp.abstract_state(plan, tx), X.astype(np.float32))
    fsdp.audit_step(plan, program, num_microbatches=2)
    fsdp.audit_step(plan, program.compile(), num_microbatches=2)
