"""A step: what it is given, what it gives back, and what it refuses."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.errors import facts
from jax import lax

import fsdp_jax as fsdp

WIDTH = 8
ROWS = 16
MESH = fsdp.make_mesh()
TX = optax.sgd(0.1)
X = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
# Four rows a rank: enough to be cut into microbatches in the wrong order.
MANY = np.random.default_rng(1).normal(size=(32, WIDTH)).astype(np.float32)
# Sums over eight ranks in another order than numpy's: some units of float32's last.
RTOL = 1e-5


def make_weights(key):
    return {"w": jax.random.normal(key, (WIDTH, WIDTH))}


@pytest.fixture(scope="module")
def plan():
    return fsdp.fully_shard(make_weights, MESH)


@pytest.fixture
def state(plan):
    return fsdp.init_state(plan, TX, fsdp.init_params(plan, jax.random.key(0)))


def square(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2)


def refusal(plan, loss, batch=X, **options) -> str:
    """What the step says when it refuses to be traced."""
    step = fsdp.make_train_step(plan, loss, TX, **options)
    with pytest.raises(ValueError) as error:
        step.lower(fsdp.abstract_state(plan, TX), batch)
    return str(error.value)


def square_with_aux(params, batch):
    count = jnp.sum(batch > 0)
    aux = {
        "mean": batch.mean(),
        "low": batch.mean().astype(jnp.bfloat16),
        "positive": count,
        "small": count.astype(jnp.uint8),
        "any": (batch > 2).any(),
        "nested": [batch[:, 0], {"rows": batch.reshape(len(batch), 2, -1)}],
        "nothing": None,
    }
    return square(params, batch), aux


def check_aux(aux):
    assert set(aux) == {"mean", "low", "positive", "small", "any", "nested", "nothing"}
    np.testing.assert_allclose(aux["mean"], MANY.mean(), rtol=RTOL, atol=1e-6)
    # Each rank's mean has the eight bits of bfloat16; their mean has more.
    np.testing.assert_allclose(aux["low"], MANY.mean(), atol=1e-2)
    assert aux["low"].dtype == jnp.float32
    assert aux["positive"] == (MANY > 0).sum()
    np.testing.assert_array_equal(aux["nested"][0], MANY[:, 0])
    np.testing.assert_array_equal(
        aux["nested"][1]["rows"], MANY.reshape(len(MANY), 2, -1)
    )
    assert aux["nothing"] is None


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_aux_means_are_averaged_counts_summed_and_rows_kept_in_order(
    plan, num_microbatches
):
    fn = fsdp.value_and_grad(
        plan, square_with_aux, has_aux=True, num_microbatches=num_microbatches
    )
    params = fsdp.init_params(plan, jax.random.key(0))
    (_, aux), _ = fn(params, MANY)
    check_aux(aux)
    assert aux["small"] == (MANY > 0).sum()
    ranks = MANY.reshape(8 * num_microbatches, -1)
    assert aux["any"] == (ranks > 2).any(1).sum()


def test_an_eval_step_reduces_aux_alike(plan):
    evaluate = fsdp.make_eval_step(plan, square_with_aux, has_aux=True)
    metrics = evaluate(fsdp.init_params(plan, jax.random.key(0)), MANY)
    check_aux(metrics["aux"])


def test_metrics_are_the_loss_and_the_norm_of_the_gradient(plan, state):
    weights = np.asarray(state.params["w"])
    step = fsdp.make_train_step(plan, square, TX)
    _, metrics = step(state, X)
    loss, grads = jax.value_and_grad(square)({"w": weights}, X)
    assert set(metrics) == {"loss", "grad_norm"}
    np.testing.assert_allclose(metrics["loss"], loss, rtol=RTOL)
    np.testing.assert_allclose(
        metrics["grad_norm"], jnp.linalg.norm(grads["w"]), rtol=RTOL
    )


def test_the_gradient_norm_is_that_before_clipping(plan):
    tx = optax.chain(optax.clip_by_global_norm(1e-3), optax.sgd(1.0))
    state = fsdp.init_state(plan, tx, fsdp.init_params(plan, jax.random.key(0)))
    before = np.asarray(state.params["w"])
    state, metrics = fsdp.make_train_step(plan, square, tx)(state, X)
    assert metrics["grad_norm"] > 0.1
    # The norm over all shards was clipped, not that of each.
    moved = np.linalg.norm(np.asarray(state.params["w"]) - before)
    np.testing.assert_allclose(moved, 1e-3, rtol=1e-3)


def test_an_eval_step_sees_the_loss_that_the_train_step_reports(plan, state):
    evaluate = fsdp.make_eval_step(plan, square)
    metrics = evaluate(state.params, X)
    assert set(metrics) == {"loss"}
    state, trained = fsdp.make_train_step(plan, square, TX)(state, X)
    np.testing.assert_allclose(metrics["loss"], trained["loss"], rtol=1e-6)
    assert evaluate(state.params, X)["loss"] < metrics["loss"]


def test_arguments_in_another_order_are_told_apart(plan):
    with pytest.raises(ValueError, match=facts("init_params", "Plan")):
        fsdp.init_params(jax.random.key(0), plan)
    with pytest.raises(ValueError, match=facts("init_state", "Plan")):
        fsdp.init_state(TX, plan)
    with pytest.raises(ValueError, match=facts("make_train_step", "Plan")):
        fsdp.make_train_step(lambda model, batch: 0.0, plan, TX)
    with pytest.raises(ValueError, match=facts("loss_fn", type(TX).__name__)):
        fsdp.make_train_step(plan, TX, lambda model, batch: 0.0)


def test_a_step_counts_and_gives_up_the_old_state(plan, state):
    old = state
    state, _ = fsdp.make_train_step(plan, square, TX)(state, X)
    assert int(state.step) == 1
    assert old.params["w"].is_deleted()
    assert not state.params["w"].is_deleted()


def test_the_callers_key_survives_the_step(plan):
    key = jax.random.key(3)
    state = fsdp.init_state(plan, TX, fsdp.init_params(plan, key), key=key)
    fsdp.make_train_step(plan, square, TX)(state, X)
    assert not key.is_deleted()


@pytest.mark.parametrize(
    "loss, returned",
    [
        (lambda p, b: (b @ p["w"]).mean(-1), r"float32[2]"),
        (lambda p, b: jnp.sum(b @ p["w"] > 0), "int32[]"),
        (lambda p, b: jnp.mean(b @ p["w"]) > 0, "bool[]"),
    ],
    ids=["rows", "integer", "bool"],
)
def test_a_loss_that_is_no_floating_point_number_is_refused(plan, loss, returned):
    says = refusal(plan, loss)
    assert f"loss_fn returned {returned}; a loss is one floating-point number" in says


def test_a_loss_in_bfloat16_is_averaged_in_float32(plan):
    def loss(params, batch):
        return square(params, batch).astype(jnp.bfloat16)

    evaluate = fsdp.make_eval_step(plan, loss)
    metrics = evaluate(fsdp.init_params(plan, jax.random.key(0)), X)
    assert metrics["loss"].dtype == jnp.float32


@pytest.mark.parametrize(
    "batch, num_microbatches, says",
    [
        (X[:12], 1, ["12", "8", "1", "16"]),
        (X, 4, ["16", "8", "4", "32"]),
        ({"x": X, "y": X[:8]}, 1, ["x: 16", "y: 8"]),
        ({"x": X, "n": np.float32(3)}, 1, ["x: 16", "n"]),
        ({}, 1, ["0"]),
    ],
)
def test_a_batch_that_does_not_divide_is_refused(
    plan, state, batch, num_microbatches, says
):
    step = fsdp.make_train_step(plan, square, TX, num_microbatches=num_microbatches)
    grads = fsdp.value_and_grad(plan, square, num_microbatches=num_microbatches)
    with pytest.raises(ValueError, match=facts(*says)):
        step(state, batch)
    with pytest.raises(ValueError, match=facts(*says)):
        grads(state.params, batch)
    assert not state.params["w"].is_deleted()


def test_rows_are_split_over_all_data_axes():
    mesh = fsdp.make_mesh(dp_outer=2, ep=2)
    plan = fsdp.fully_shard(make_weights, mesh)
    evaluate = fsdp.make_eval_step(
        plan, lambda p, b: (square(p, b), jnp.int32(len(b))), has_aux=True
    )
    metrics = evaluate(fsdp.init_params(plan, jax.random.key(0)), X)
    assert metrics["aux"] == ROWS


def noisy(params, batch, key):
    """Each rank and microbatch returns its own noise, once a row."""
    noise = jax.random.normal(key, ())
    return square(params, batch) + 0 * noise, jnp.full(len(batch), noise)


def test_a_loss_that_asks_for_a_key_gets_its_own_on_each_rank_and_microbatch(plan):
    fn = fsdp.value_and_grad(plan, noisy, has_aux=True, num_microbatches=2)
    params = fsdp.init_params(plan, jax.random.key(0))
    (_, noise), _ = fn(params, X, key=jax.random.key(0))
    assert len(set(np.asarray(noise).tolist())) == 16
    (_, again), _ = fn(params, X, key=jax.random.key(0))
    np.testing.assert_array_equal(noise, again)
    (_, other), _ = fn(params, X, key=jax.random.key(1))
    assert not set(np.asarray(noise).tolist()) & set(np.asarray(other).tolist())


def test_a_loss_that_asks_for_a_key_gets_another_each_step(plan, state):
    step = fsdp.make_train_step(plan, noisy, TX, has_aux=True)
    state, first = step(state, X)
    state, second = step(state, X)
    assert not set(first["aux"].tolist()) & set(second["aux"].tolist())


def test_a_random_loss_without_a_key_is_refused(plan):
    params = fsdp.init_params(plan, jax.random.key(0))
    fn = fsdp.value_and_grad(plan, noisy, has_aux=True)
    evaluate = fsdp.make_eval_step(plan, noisy, has_aux=True)
    for call in (fn, evaluate):
        with pytest.raises(ValueError, match=facts("key=jax.random.key(...)")):
            call(params, X)


class Dropped(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.linear(x))


def test_a_model_with_state_without_it_is_refused():
    plan = fsdp.fully_shard(lambda key: Dropped(nnx.Rngs(key)), MESH)
    params = fsdp.init_params(plan, jax.random.key(0))

    def loss(model, batch):
        return jnp.mean(model(batch) ** 2)

    fn = fsdp.value_and_grad(plan, loss)
    for call in (fn, fsdp.make_eval_step(plan, loss)):
        with pytest.raises(
            ValueError,
            match=facts("2", "dropout.rngs.count", "model_state=state.model_state"),
        ):
            call(params, X)
    state = fsdp.init_state(plan, TX, params).model_state
    with pytest.raises(ValueError, match=facts("key=jax.random.key(...)")):
        fn(params, X, model_state=state)
    (_, _, new), _ = fn(params, X, model_state=state, key=jax.random.key(0))
    assert int(new["dropout"]["rngs"]["count"][...]) == 1
    keys = [
        jax.random.key_data(tree["dropout"]["rngs"]["key"][...])
        for tree in (state, new)
    ]
    np.testing.assert_array_equal(*keys)  # counted on, not replaced


@pytest.mark.parametrize("dtype", [np.uint8, np.int32])
def test_batches_of_integers_reach_the_loss_as_they_are(plan, dtype):
    def loss(params, batch):
        assert batch.dtype == dtype
        return square(params, batch.astype(jnp.float32))

    batch = np.arange(ROWS * WIDTH).reshape(ROWS, WIDTH).astype(dtype)
    evaluate = fsdp.make_eval_step(plan, loss)
    params = fsdp.init_params(plan, jax.random.key(0))
    want = square({"w": np.asarray(params["w"])}, batch.astype(np.float32))
    np.testing.assert_allclose(evaluate(params, batch)["loss"], want, rtol=RTOL)


def test_a_batch_may_lie_anywhere(plan):
    evaluate = fsdp.make_eval_step(plan, square)
    params = fsdp.init_params(plan, jax.random.key(0))
    want = evaluate(params, X)["loss"]
    across = jax.NamedSharding(MESH, jax.P(None, "dp_shard"))
    for where in (jax.devices()[3], across, plan.batch_sharding):
        assert evaluate(params, jax.device_put(X, where))["loss"] == want


def slow(params, batch):
    """A loss that takes some time."""
    start = jnp.full((128, 128), batch.mean() * params["w"].mean())
    work = lax.fori_loop(0, 40, lambda i, x: jnp.tanh(x @ x), start)
    return work.mean()


def test_on_simulated_devices_a_call_is_waited_for(plan, state):
    """XLA for CPUs deadlocks where more than 32 programs of a device are under way."""
    step = fsdp.make_train_step(plan, slow, TX)
    grad = fsdp.value_and_grad(plan, slow)
    evaluate = fsdp.make_eval_step(plan, slow)
    params = fsdp.init_params(plan, jax.random.key(0))
    for _ in range(2):  # The second time there is nothing to compile.
        state, metrics = step(state, X)
        (loss, _), _ = grad(params, X)
        assert metrics["loss"].is_ready()
        assert loss.is_ready()
        assert evaluate(params, X)["loss"].is_ready()
    # Left to jax a program is still under way when its call returns.
    _, unwaited = step.jitted(state, jax.device_put(X, plan.batch_sharding))
    assert not unwaited["loss"].is_ready()
