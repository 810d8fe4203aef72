"""What a plan, a step and a checkpoint make of `cp`; attention is tested elsewhere."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.compare import host, worst
from helpers.errors import facts
from jax.sharding import PartitionSpec as P

import fsdp_jax as fsdp

TX = optax.adamw(1e-2)
ROWS, SEQ, EMBED = 8, 16, 8
SPLIT = {"x": 1, "y": -2}


def make_weights(key):
    return {"layers": 0.3 * jax.random.normal(key, (2, EMBED, EMBED))}


def layer(w, x):
    return jnp.tanh(x @ w), None


def loss_fn(weights, batch):
    """Sees each token by itself, so that the split changes no number."""
    x, _ = fsdp.scan(layer, weights["layers"], batch["x"] * batch["scale"][..., None])
    return jnp.mean((x - batch["y"]) ** 2)


def batch(**changes):
    random = np.random.default_rng(0)
    shapes = {"x": (ROWS, SEQ, EMBED), "y": (ROWS, SEQ, EMBED), "scale": (ROWS, 1)}
    made = {k: random.normal(size=s).astype(np.float32) for k, s in shapes.items()}
    return made | changes


def plan_of(split=SPLIT, **sizes):
    config = fsdp.FSDPConfig(context_parallel=split)
    mesh = fsdp.make_mesh(**sizes)
    return fsdp.fully_shard(make_weights, mesh, [fsdp.Stacked("layers")], config)


@pytest.fixture(scope="module")
def plan():
    return plan_of(dp_outer=2, cp=2)


@pytest.fixture(scope="module")
def trained(plan):
    step = fsdp.make_train_step(plan, loss_fn, TX)
    state = fsdp.init_state(plan, TX, fsdp.init_params(plan, jax.random.key(0)))
    return step(state, batch())


def test_parameters_are_split_over_cp_and_batches_on_the_dims_that_are_named(plan):
    assert plan.param_plans[0].spec(plan.placements.optimizer) == P(
        None, ("dp_shard", "cp")
    )
    rows = ("dp_outer", "dp_shard", "ep")
    assert plan.batch_specs(batch()) == {
        "x": P(rows, "cp"),
        "y": P(rows, "cp"),
        "scale": P(rows),
    }
    assert "the sequence of a batch, over cp=2: dim 1 of x, dim -2 of y" in repr(plan)
    whole = plan_of().batch_specs(batch())
    assert set(jax.tree.leaves(whole, is_leaf=lambda x: isinstance(x, P))) == {P(rows)}


def test_a_pattern_names_a_batch_that_is_a_single_array():
    tokens = np.zeros((ROWS, SEQ), np.int32)
    assert plan_of({"*": 1}, cp=4).batch_specs(tokens)[1] == "cp"


def test_the_loss_is_the_mean_over_all_tokens(trained):
    state, metrics = trained
    plan = plan_of(devices=jax.devices()[:1])
    step = fsdp.make_train_step(plan, loss_fn, TX)
    start = fsdp.init_state(plan, TX, fsdp.init_params(plan, jax.random.key(0)))
    want, told = step(start, batch())
    assert worst(host(state.params), host(want.params)) < 1e-5
    for name in ("loss", "grad_norm"):
        assert abs(float(metrics[name]) - float(told[name])) < 1e-6


@pytest.mark.parametrize(
    "there", [{"cp": 1}, {"dp_shard": 1, "cp": 8}, {"dp_outer": 4, "cp": 2}], ids=str
)
def test_a_checkpoint_knows_nothing_of_cp(there, trained, tmp_path):
    state, _ = trained
    fsdp.save(tmp_path / "there", state)
    moved = fsdp.load(tmp_path / "there", fsdp.abstract_state(plan_of(**there), TX))
    fsdp.save(tmp_path / "back", moved)
    like = fsdp.abstract_state(plan_of(dp_outer=2, cp=2), TX)
    back = fsdp.load(tmp_path / "back", like)
    for a, b, c in zip(*map(jax.tree.leaves, (state, moved, back)), strict=True):
        if not jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(a, b)
            np.testing.assert_array_equal(a, c)
            assert c.sharding == a.sharding


@pytest.mark.parametrize(
    "split, given, says",
    [
        ({"z": 1}, {}, ["'z'"]),
        ({"x": 3}, {}, ["'x'", "dim 3", "(8, 16, 8)"]),
        ({"x": -3}, {}, ["'x'", "dim -3", "(8, 16, 8)"]),
        ({"scale": 1}, {}, ["'scale'", "dim 1", "(8, 1)", "4"]),
        (SPLIT, {"x": np.zeros((ROWS, 5, EMBED))}, ["'x'", "dim 1", "(8, 5, 8)", "4"]),
    ],
)
def test_a_batch_whose_sequence_is_not_where_it_should_be_is_refused(
    split, given, says
):
    plan = plan_of(split, cp=2)
    step = fsdp.make_train_step(plan, loss_fn, TX)
    with pytest.raises(
        ValueError, match=facts("FSDPConfig(context_parallel=...)", "cp=2", *says)
    ):
        step.lower(fsdp.abstract_state(plan, TX), batch(**given))


def test_arrays_beside_a_loss_that_sees_parts_of_rows_are_refused(plan):
    forward = fsdp.make_forward(plan, lambda weights, batch: {"first": batch["x"][0]})
    params = fsdp.init_params(plan, jax.random.key(0))
    with pytest.raises(ValueError, match=facts("cp", "first", "(8, 8)")):
        forward(params, batch())
