"""Keys that a model holds: which are folded, which are not, and what the plan says."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fsdp_jax as fsdp

FOLDED, PLAIN = "keys that are others", "jax.random.PRNGKey"
BATCH = {"x": np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)}


def features(held, draw=lambda held: held):
    """(a model of a weight and `held`, its loss with features drawn from that)."""

    def make_model(key):
        return {"w": jax.random.normal(key, (8, 8)), "held": held()}

    def loss_fn(model, batch):
        drawn = jax.random.normal(draw(model["held"]), (8, 8))
        return jnp.mean((batch["x"] @ model["w"] @ drawn) ** 2)

    return make_model, loss_fn


def losses(make_model, loss_fn):
    """The loss of two steps that change no weight, and that of plain JAX."""
    plan = fsdp.fully_shard(make_model, fsdp.make_mesh())
    params = fsdp.init_params(plan, jax.random.key(0))
    tx = optax.sgd(0.0)
    state = fsdp.init_state(plan, tx, params)
    step = fsdp.make_train_step(plan, loss_fn, tx)
    state, first = step(state, BATCH)
    _, second = step(state, BATCH)
    plain = loss_fn(make_model(jax.random.key(0)), BATCH)
    return float(first["loss"]), float(second["loss"]), float(plain)


@pytest.mark.parametrize(
    "form",
    [
        (lambda: jax.random.key_data(jax.random.key(7)), jax.random.wrap_key_data),
        (lambda: jax.random.PRNGKey(7),),
    ],
    ids=["data of a key", "old key"],
)
def test_numbers_that_are_part_of_a_model_are_those_of_plain_jax(form):
    first, second, plain = losses(*features(*form))
    np.testing.assert_allclose([first, second], plain, rtol=1e-5)


def test_a_typed_key_is_another_in_each_step():
    first, second, plain = losses(*features(lambda: jax.random.key(7)))
    assert abs(first - second) > 1e-2 * plain
    assert abs(first - plain) > 1e-2 * plain


class Net(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(8, 8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


class Features(Net):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.projection = nnx.Variable(jax.random.key(1))


def nnx_model(model):
    return lambda key: model(nnx.Rngs(key))


@pytest.mark.parametrize(
    "make_model, said",
    [
        (features(lambda: jax.random.key(7))[0], {FOLDED: "held"}),
        (features(lambda: jax.random.PRNGKey(7))[0], {PLAIN: "held"}),
        (nnx_model(Net), {}),
        (nnx_model(Features), {FOLDED: "projection"}),
    ],
    ids=["key", "old key", "Rngs", "Rngs and a key"],
)
def test_a_plan_names_the_keys_that_may_surprise(make_model, said):
    lines = str(fsdp.fully_shard(make_model, fsdp.make_mesh())).splitlines()
    for start in (FOLDED, PLAIN):
        of_it = [line for line in lines if start in line]
        assert len(of_it) == (start in said)
        assert all(f": {said[start]};" in line for line in of_it)


def test_a_plan_names_what_no_checkpoint_holds():
    def make_model(key):
        return {"w": jnp.ones((8, 8)), "none": jnp.zeros((0, 4))}

    assert "cannot hold: none" in str(fsdp.fully_shard(make_model, fsdp.make_mesh()))
