"""Tokens weigh the same, however unevenly masks spread them over ranks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.compare import worst
from helpers.errors import facts
from helpers.zoo import CASES, ROWS, SEQ, batch

import fsdp_jax as fsdp

CASE = CASES["plain pytree"]


def masked_batch():
    """Rows with 0 to 5 tokens that count; two ranks have none at all."""
    kept = np.arange(ROWS) % (SEQ + 1)
    kept[:4] = 0
    return batch() | {"mask": np.arange(SEQ) < kept[:, None]}


def sum_and_count(params, batch):
    losses = ((CASE.apply(params, batch["x"]) - batch["y"]) ** 2).mean(-1)
    return (losses * batch["mask"]).sum(), batch["mask"].sum()


def mean(params, batch):
    total, count = sum_and_count(params, batch)
    return total / count


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("strategy", [0, 2, 3])
def test_unequal_counts_give_the_mean_over_all_tokens(strategy, num_microbatches):
    plan = CASE.plan(fsdp.make_mesh(), zero_dp_strategy=strategy)
    compute = fsdp.value_and_grad(
        plan,
        sum_and_count,
        num_microbatches=num_microbatches,
        calculate_per_token_loss=True,
    )
    (loss, _), grads = compute(CASE.sharded(plan), masked_batch())
    params, _ = CASE.weights()
    want_loss, want = jax.value_and_grad(mean)(params, masked_batch())
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    error = worst(grads, want)
    assert error < 1e-5


def test_a_mean_of_means_would_be_noticed():
    plan = CASE.plan(fsdp.make_mesh())
    data = masked_batch()
    data["mask"][:, 0] = True  # Without a rank that divides by zero.
    (loss, _), _ = fsdp.value_and_grad(plan, mean)(CASE.sharded(plan), data)
    params, _ = CASE.weights()
    assert abs(loss - mean(params, data)) > 1e-3


def test_a_batch_without_tokens_has_no_loss_and_no_gradient():
    plan = CASE.plan(fsdp.make_mesh())
    data = batch() | {"mask": np.zeros((ROWS, SEQ), bool)}
    tx = optax.sgd(0.1)
    step = fsdp.make_train_step(plan, sum_and_count, tx, calculate_per_token_loss=True)
    state = fsdp.init_state(plan, tx, CASE.sharded(plan))
    before = [np.asarray(leaf) for leaf in jax.tree.leaves(state.params)]
    state, metrics = step(state, data)
    assert float(metrics["loss"]) == 0 and float(metrics["grad_norm"]) == 0
    for old, new in zip(before, jax.tree.leaves(state.params), strict=True):
        np.testing.assert_array_equal(old, new)


def test_evaluation_weighs_tokens_too():
    plan = CASE.plan(fsdp.make_mesh())
    evaluate = fsdp.make_eval_step(plan, sum_and_count, calculate_per_token_loss=True)
    params, _ = CASE.weights()
    got = evaluate(CASE.sharded(plan), masked_batch())["loss"]
    np.testing.assert_allclose(got, mean(params, masked_batch()), rtol=1e-6)


@pytest.mark.parametrize(
    "loss, per_token, message",
    [
        (lambda p, b: jnp.float32(0), True, ["(sum, count)", "DynamicJaxprTracer"]),
        (sum_and_count, False, ["tuple", "calculate_per_token_loss=True"]),
    ],
)
def test_the_other_form_of_loss_is_refused(loss, per_token, message):
    plan = CASE.plan(fsdp.make_mesh())
    compute = fsdp.value_and_grad(plan, loss, calculate_per_token_loss=per_token)
    with pytest.raises(ValueError, match=facts(*message)):
        compute(CASE.sharded(plan), masked_batch())
