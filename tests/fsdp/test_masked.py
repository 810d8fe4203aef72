"""Reductions over what masks leave: the same on one device and over all ranks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.compare import worst
from helpers.errors import facts
from helpers.zoo import CASES, ROWS, SEQ, batch
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import fsdp_jax as fsdp
from fsdp_jax import ops

CASE = CASES["plain pytree"]
RANDOM = np.random.default_rng(0)
VALUES = RANDOM.normal(3.0, 2.0, (16, 7)).astype(np.float32)
MASK = RANDOM.random((16, 7)) < 0.4
MASK[:4] = False  # ranks that have nothing
KEPT = VALUES[MASK].astype(np.float64)

NUMBERS = {
    ops.masked_sum: KEPT.sum(),
    ops.masked_mean: KEPT.mean(),
    ops.masked_var: KEPT.var(ddof=1),
    ops.masked_max: KEPT.max(),
    ops.masked_min: KEPT.min(),
}


def over_ranks(op):
    """On eight ranks, each with two rows; the result of every one of them."""
    rows = P(("dp_outer", "dp_shard"))
    return jax.jit(
        jax.shard_map(
            lambda *args: op(*args)[None],
            mesh=fsdp.make_mesh(dp_outer=2),
            in_specs=rows,
            out_specs=rows,
            check_vma=False,
        )
    )


@pytest.mark.parametrize("op", NUMBERS, ids=lambda op: op.__name__)
def test_a_number_is_that_of_all_values_that_are_left(op):
    np.testing.assert_allclose(op(VALUES, MASK), NUMBERS[op], rtol=1e-6)
    of_ranks = over_ranks(op)(VALUES, MASK)
    np.testing.assert_allclose(of_ranks, np.full(8, NUMBERS[op]), rtol=1e-6)


def test_counts_are_exact():
    many = jnp.ones(2**24 + 1, bool)  # where float32 ends to count
    assert ops.masked_count(many) == 2**24 + 1
    assert (over_ranks(ops.masked_count)(MASK) == MASK.sum()).all()


@pytest.mark.parametrize("shift_mean", [True, False])
def test_what_is_left_is_whitened(shift_mean):
    def op(values, mask):
        return ops.masked_whiten(values, mask, shift_mean=shift_mean)

    want = (VALUES - KEPT.mean()) / KEPT.std(ddof=1)
    want += 0 if shift_mean else KEPT.mean()
    want[~MASK] = 0
    np.testing.assert_allclose(op(VALUES, MASK), want, atol=2e-6)
    got = over_ranks(op)(VALUES, MASK).reshape(VALUES.shape)
    np.testing.assert_allclose(got, want, atol=2e-6)


def test_a_mask_may_hold_weights():
    weights = RANDOM.random(VALUES.shape).astype(np.float32)
    want = np.average(VALUES, weights=weights)
    np.testing.assert_allclose(ops.masked_mean(VALUES, weights), want, rtol=1e-6)


def test_what_is_left_out_is_not_read():
    hidden = jnp.where(MASK, VALUES, jnp.nan)

    def fn(values):
        moments = ops.masked_mean(values, MASK) * ops.masked_var(values, MASK)
        return moments + (ops.masked_whiten(values, MASK) ** 3).sum()

    grad_of = jax.jit(jax.value_and_grad(fn))
    value, grad = grad_of(hidden)
    want, want_grad = grad_of(jnp.asarray(VALUES))
    np.testing.assert_allclose(value, want)
    np.testing.assert_allclose(grad[MASK], want_grad[MASK])
    assert not grad[~MASK].any()


def test_sums_of_bfloat16_are_in_float32():
    ones = jnp.ones(1000, jnp.bfloat16)
    assert ops.masked_sum(ones, ones) == 1000
    assert ops.masked_sum(ones, ones).dtype == jnp.float32


def test_of_too_few_there_is_no_variance_but_a_mean():
    none, one = np.zeros(3, bool), np.arange(3) == 1
    values = jnp.arange(3.0)
    assert ops.masked_mean(values, none) == 0
    assert ops.masked_mean(values, one) == 1
    assert jnp.isnan(ops.masked_var(values, one))
    assert jnp.isnan(ops.masked_var(values, none, unbiased=False))
    assert ops.masked_var(values, one, unbiased=False) == 0
    assert ops.masked_max(values, none) == -jnp.inf


# In a loss.


def masked_batch():
    """Rows with 0 to 5 tokens that count; two ranks have none at all."""
    kept = np.arange(ROWS) % (SEQ + 1)
    kept[:4] = 0
    return batch() | {"mask": np.arange(SEQ) < kept[:, None]}


def loss_over(**axes):
    def loss_fn(params, batch):
        losses = ((CASE.apply(params, batch["x"]) - batch["y"]) ** 2).mean(-1)
        return ops.masked_mean(losses, batch["mask"], **axes)

    return loss_fn


def test_a_loss_over_all_ranks_trains_as_one_device_does():
    plan = CASE.plan(fsdp.make_mesh(dp_outer=2))
    params, _ = CASE.weights()
    want, want_grads = jax.value_and_grad(loss_over())(params, masked_batch())
    compute = fsdp.value_and_grad(plan, loss_over())
    (loss, _), grads = compute(CASE.sharded(plan), masked_batch())
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    error = worst(grads, want_grads)
    assert error < 1e-5


def test_a_loss_of_each_rank_alone_would_be_noticed():
    plan = CASE.plan(fsdp.make_mesh())
    compute = fsdp.value_and_grad(plan, loss_over(axes=()))
    (loss, _), _ = compute(CASE.sharded(plan), masked_batch())
    params, _ = CASE.weights()
    assert abs(loss - loss_over()(params, masked_batch())) > 1e-3


def test_other_axes_and_other_shapes_are_refused():
    mesh = jax.make_mesh((8,), ("rank",), axis_types=(AxisType.Auto,))
    local = jax.shard_map(
        ops.masked_sum, mesh=mesh, in_specs=P("rank"), out_specs=P(), check_vma=False
    )
    with pytest.raises(
        ValueError, match=facts("('rank',)", "dp_outer, dp_shard", "axes=...")
    ):
        local(VALUES, MASK)
    with pytest.raises(ValueError, match=facts("(16,)", "(16, 7)")):
        ops.masked_mean(VALUES, MASK[:, 0])
