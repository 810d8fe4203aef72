"""What linen's users write: in units it computes what it does on one device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.linen import spmd
from helpers.errors import facts

import fsdp_jax as fsdp

WIDTH, VOCABULARY = 4, 6
# float64: what differs is the order of sums.
TOLERANCE = 1e-9
X = np.random.default_rng(0).normal(size=(8, WIDTH))
TOKENS = np.arange(8) % VOCABULARY
Dense = functools.partial(nn.Dense, WIDTH, param_dtype=jnp.float64)


@pytest.fixture(scope="module", autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def mesh(devices=2):
    return fsdp.make_mesh(devices=jax.devices()[:devices])


def error(y):
    return jnp.mean((y - 1) ** 2)


def total(tree):
    """Of all leaves, more if there are more of them, and linear in rows."""
    leaves = jax.tree.leaves(tree)
    return len(leaves) * sum(jnp.mean(leaf) for leaf in leaves)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + Dense()(jnp.tanh(Dense()(x)))


class Writing(nn.Module):
    """Sows, below itself too, and makes a variable when it is applied."""

    @nn.compact
    def __call__(self, x):
        made = self.variable("cache", "seen", jnp.zeros_like, x)
        x = Block()(x)
        made.value += x**2
        self.sow("losses", "balance", jnp.mean(x**2))
        return jnp.tanh(x) + made.value


class TwoWriting(nn.Module):
    def setup(self):
        self.a, self.b = Writing(), Writing()

    def __call__(self, x):
        return self.a(self.b(self.a(x)))


def written(variables, x):
    return TwoWriting().apply(
        {"params": variables["params"]}, x, mutable=["losses", "cache"]
    )


def written_loss(variables, x):
    y, new = written(variables, x)
    return error(y) + total(new)


def captured_loss(variables, x):
    given = {"params": variables["params"]}
    y, new = TwoWriting().apply(given, x, mutable=True, capture_intermediates=True)
    return error(y) + total(new["intermediates"])


class Coder(nn.Module):
    def setup(self):
        self.inner, self.outer = Block(), Block()

    def encode(self, x):
        return self.inner(x)

    def __call__(self, x):
        return self.outer(self.encode(x))


class Coding(nn.Module):
    def setup(self):
        self.coder, self.head = Coder(), Dense()

    def __call__(self, x):
        return self.head(self.coder.encode(x)) + self.coder(x)


def make_two_models(key):
    other = jax.random.fold_in(key, 1)
    return {
        "actor": Coding().init(key, X)["params"],
        "critic": Coding().init(other, X),
    }


def two_models_loss(models, x):
    y = Coding().apply({"params": models["actor"]}, x)
    return error(y) + error(Coding().apply(models["critic"], y))


class Boxed(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        for box, names in (
            (nn.with_logical_partitioning, ("embed", "mlp")),
            (nn.with_partitioning, ("dp_shard", None)),
        ):
            x = jnp.tanh(Dense(kernel_init=box(init, names))(x))
            x = spmd.with_logical_constraint(x, ("batch", "embed"))
        return x


RULES = (("batch", "dp_shard"), ("embed", "dp_shard"), ("mlp", None))


@contextlib.contextmanager
def under_rules():
    with jax.set_mesh(mesh()), nn.logical_axis_rules(RULES):
        yield


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        self.sow("losses", "balance", jnp.mean(x**2))
        return Block()(x), None


def scanned(x, dim):
    axes: Any = {"params": dim, "losses": 0}
    layers = nn.scan(
        nn.remat(Layer), variable_axes=axes, split_rngs={"params": True}, length=3
    )
    return layers(name="layers")(x, None)[0]


class Scanned(nn.Module):
    dim: int = 0

    @nn.compact
    def __call__(self, x):
        return scanned(x, self.dim)


def scanned_loss(variables, x):
    given = {"params": variables["params"]}
    y, new = Scanned().apply(given, x, mutable=["losses"])
    return error(y) + total(new)


class Tied(nn.Module):
    """The embedding is a weight of a module's `setup`, and has two methods."""

    def setup(self):
        self.embed = nn.Embed(VOCABULARY, WIDTH, param_dtype=jnp.float64)
        self.block = Block()

    def __call__(self, tokens):
        return self.embed.attend(self.block(self.embed(tokens)))


class Case(NamedTuple):
    make: Callable[..., Any]
    loss: Callable[..., Any]
    units: tuple[Any, ...]
    batch: np.ndarray[Any, Any] = X
    context: Callable[[], Any] = contextlib.nullcontext


def of_module(module, batch: np.ndarray[Any, Any] = X):
    """How a module is made, and a loss of it."""

    def loss(variables, x):
        return error(module.apply(variables, x))

    return lambda key: module.init(key, batch), loss


def make_parameters(key):
    return {"params": TwoWriting().init(key, X)["params"]}


CASES = {
    "sows and makes a cache": Case(
        make_parameters, written_loss, ("params.a", "params.b")
    ),
    "captures intermediates": Case(
        make_parameters, captured_loss, ("params.a", "params.b")
    ),
    "no level of params, two models, methods": Case(
        make_two_models, two_models_loss, ("actor.coder", "critic.params.coder")
    ),
    "boxes under rules": Case(
        *of_module(Boxed()), ("params.Dense_0",), context=under_rules
    ),
    "a scanned stack": Case(
        lambda key: {"params": Scanned().init(key, X)["params"]},
        scanned_loss,
        (fsdp.Stacked("params.layers"),),
    ),
    "a tied embedding": Case(*of_module(Tied(), TOKENS), ("params.embed",), TOKENS),
}


@pytest.mark.parametrize("name", CASES)
def test_units_compute_what_linen_does(name):
    case = CASES[name]
    with case.context():
        plan = fsdp.fully_shard(case.make, mesh(), case.units)
        params = fsdp.init_params(plan, jax.random.key(0))
        (loss, _), grads = fsdp.value_and_grad(plan, case.loss)(params, case.batch)
    assert plan.units
    want = jax.value_and_grad(case.loss)(jax.device_get(params), case.batch)
    assert_same((loss, grads), want)


def assert_same(got, want):
    got, want = fsdp.sharding.named_leaves(got), fsdp.sharding.named_leaves(want)
    for (name, a), (_, b) in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, TOLERANCE, TOLERANCE, err_msg=name)


class Dropping(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.5, deterministic=False)(Dense()(x))


class TwoDropping(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Dropping(name="b")(Dropping(name="a")(x))


def test_a_unit_drops_what_linen_drops_without_it():
    def make(key):
        keys = {"params": key, "dropout": key}
        return {"params": TwoDropping().init(keys, X)["params"]}

    def loss(variables, x):
        rngs = {"dropout": jax.random.key(1)}
        return error(TwoDropping().apply(variables, x, rngs=rngs))

    plan = fsdp.fully_shard(make, mesh(1), ["params.*"])
    params = fsdp.init_params(plan, jax.random.key(0))
    (got, _), _ = fsdp.value_and_grad(plan, loss)(params, X)
    np.testing.assert_allclose(got, loss(jax.device_get(params), X), TOLERANCE)


class Table(nn.Module):
    @nn.compact
    def __call__(self, x):
        table = self.variable("constants", "table", jnp.ones, (3, WIDTH))
        norm = nn.BatchNorm(use_running_average=False, param_dtype=jnp.float64)
        return Dense()(norm(x * table.value.mean()))


TREES = {
    "linen's own": lambda variables: variables,
    "nested": lambda variables: {"net": variables},
    "a tuple, made by a cached jit": lambda variables: tuple(variables.values()),
    "made under vmap": lambda variables: variables,
}


@pytest.mark.parametrize("name", TREES)
def test_collections_but_params_are_state_in_any_tree(name):
    def make(key):
        init = jax.jit(Table().init)
        if name == "made under vmap":
            return jax.vmap(init, in_axes=(0, None))(jax.random.split(key, 3), X)
        return TREES[name](init(key, X))

    make(jax.random.key(0))  # Traced once already, it calls no module again.
    plan = fsdp.fully_shard(make, mesh())
    trained = {param.name.split(".")[-1] for param in plan.param_plans}
    assert trained == {"kernel", "bias", "scale"}
    state = {n.split(".")[-1] for n, _ in fsdp.sharding.named_leaves(plan.model_state)}
    assert state == {"table", "mean", "var"}
    assert "table" in repr(plan)


def test_a_constant_stays_to_the_bit_when_weights_decay():
    third = jnp.asarray(1 / 3)  # The mean of three of it is another number.

    class Scaled(nn.Module):
        @nn.compact
        def __call__(self, x):
            scale = self.variable("constants", "scale", lambda: third)
            return Dense()(x * scale.value)

    def loss(variables, x):
        y, new = Scaled().apply(variables, x, mutable=["constants"])
        return error(y), fsdp.step.UpdatedModel(new)

    plan = fsdp.fully_shard(lambda key: Scaled().init(key, X), mesh(3))
    tx = optax.adamw(0.1, weight_decay=0.1)
    state = fsdp.init_state(plan, tx, fsdp.init_params(plan, jax.random.key(0)))
    step = fsdp.make_train_step(plan, loss, tx)
    state, _ = step(state, np.resize(X, (9, WIDTH)))
    assert state.model_state["constants"]["scale"] == third


def test_what_may_be_a_parameter_or_not_is_refused_by_name():
    def make(key):
        return {"params": {"w": jnp.ones(2)}, "head": jnp.ones(2), "ids": jnp.arange(2)}

    with pytest.raises(ValueError, match=facts("head", 1, "'params'")):
        fsdp.fully_shard(make, mesh())


def test_a_stack_on_another_dim_is_refused_by_name():
    units = [fsdp.Stacked("params.layers")]
    make, _ = of_module(Scanned(1))
    with pytest.raises(ValueError, match=facts("(4, 3, 4)", "(4, 4)", "variable_axes")):
        fsdp.fully_shard(make, mesh(), units)


def test_a_part_of_a_unit_outside_of_it_is_refused_by_name():
    make, _ = of_module(Coding())
    plan = fsdp.fully_shard(make, mesh(), ["params.coder"])
    params = fsdp.init_params(plan, jax.random.key(0))

    def loss(variables, x):
        part = variables["params"]["coder"]["inner"]["Dense_0"]
        return error(Dense().apply({"params": part}, x))

    with pytest.raises(
        ValueError, match=facts('"kernel"', "(4, 4)", "(2, 4)", "`units`")
    ):
        fsdp.value_and_grad(plan, loss)(params, X)
