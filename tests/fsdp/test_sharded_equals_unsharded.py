"""The first law: what eight devices compute is what one computes."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.compare import host, relative_errors, worst
from helpers.zoo import CASES, Case, batch

import fsdp_jax as fsdp
from fsdp_jax._tree import named_leaves
from fsdp_jax.sharding._model_def import describe

# ||a - b|| / ||b|| for each leaf, but those whose exact gradient is zero (the zoo names
# them): what moves these is rounding, which Adam divides by its own size. Only the
# order of summation differs between eight devices and one: some 1e-7 in float32, sums
# of this length, 1e-16 in float64, where no rounding can hide a wrong sum. In bfloat16
# (8 bits) a number is off by up to 2^-8, and gradients through two layers by a few of
# that.
GRADS_FP32 = 1e-5
PARAMS_FP64 = 1e-9
PARAMS_FP32 = 1e-5
GRADS_BF16 = 5e-2

STEPS = 5


def adamw(eps: float) -> optax.GradientTransformation:
    """AdamW whose state also keeps the last gradient, to look at."""
    keep = optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda grads, state, params=None: (grads, grads),
    )
    return optax.chain(keep, optax.adamw(1e-2, eps=eps, weight_decay=0.1))


@dataclasses.dataclass
class Runs:
    """The same model on eight devices and, without any of our code, on one.

    Attributes:
      state: The sharded state at the end.
      params: Sharded and unsharded parameters at the end.
      grads: Sharded and unsharded gradients of the first step.
      losses: Sharded and unsharded losses.
      compute: The unsharded `compute(params, batch) -> (loss, grads)`.
    """

    case: Case
    state: fsdp.TrainState
    params: tuple[Any, Any]
    grads: tuple[Any, Any]
    losses: tuple[list[float], list[float]]
    compute: Any


def train_sharded(case: Case, tx, data):
    dtype = data["x"].dtype
    plan = case.plan(fsdp.make_mesh(), dtype)
    step = fsdp.make_train_step(plan, case.loss, tx)
    state, losses, grads = (
        fsdp.init_state(plan, tx, case.sharded(plan, dtype)),
        [],
        None,
    )
    for _ in range(STEPS):
        state, metrics = step(state, data)
        grads = host(state.opt_state[0]) if grads is None else grads
        losses.append(float(metrics["loss"]))
    return state, grads, losses


def train_on_one(case: Case, tx, data):
    params, rest = case.weights(data["x"].dtype)
    merge = describe(case.make(data["x"].dtype)).merge

    @jax.jit
    def compute(params, data):
        return jax.value_and_grad(lambda p: case.loss(merge(p, rest), data))(params)

    update = jax.jit(tx.update)
    opt_state, losses, grads = tx.init(params), [], None
    for _ in range(STEPS):
        loss, new = compute(params, data)
        updates, opt_state = update(new, opt_state, params)
        params = jax.tree.map(jnp.add, params, updates)
        grads = host(new) if grads is None else grads
        losses.append(float(loss))
    return host(params), grads, losses, compute


def train_both(name: str, dtype, eps: float) -> Runs:
    case, data, tx = CASES[name], batch(dtype), adamw(eps)
    state, grads, losses = train_sharded(case, tx, data)
    params, want, want_losses, compute = train_on_one(case, tx, data)
    return Runs(
        case,
        state,
        (host(state.params), params),
        (grads, want),
        (losses, want_losses),
        compute,
    )


@pytest.fixture(scope="module", params=CASES)
def runs(request) -> Runs:
    return train_both(request.param, np.float32, eps=1e-4)


def sharded_gradients(case: Case, plan: fsdp.Plan, data, **options):
    """(loss, gradients) at the case's weights."""
    params, extra = case.sharded(plan), {}
    if plan.has_keys:  # Dropout, here at rate zero.
        state = fsdp.init_state(plan, optax.identity(), params)
        extra = {"model_state": state.model_state, "key": jax.random.key(0)}
    value, grads = fsdp.value_and_grad(plan, case.loss, **options)(
        params, data, **extra
    )
    return value[0], host(grads)


def test_gradients_equal_those_of_one_device(runs):
    error = worst(*runs.grads, without=runs.case.zero_grads)
    assert error < GRADS_FP32


def test_gradients_of_a_single_rank_would_be_noticed(runs):
    params, _ = runs.case.weights()
    first_rows = jax.tree.map(lambda x: x[: len(x) // 8], batch())
    _, grads = runs.compute(params, first_rows)
    errors = relative_errors(grads, runs.grads[1], without=runs.case.zero_grads)
    smallest = min(errors.values())
    assert smallest > 100 * GRADS_FP32


def test_exactly_zero_gradients_are_rounding_on_both(runs):
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(runs.grads[1]))
    for tree in runs.grads:
        for name, leaf in named_leaves(tree):
            if name.endswith(runs.case.zero_grads or ("\0",)):
                assert np.abs(leaf).max() < 1e-6 * largest, name


def test_parameters_after_five_steps_equal_those_of_one_device(runs):
    error = worst(*runs.params, without=runs.case.zero_grads)
    assert error < PARAMS_FP32


def test_losses_equal_those_of_one_device(runs):
    np.testing.assert_allclose(*runs.losses, rtol=1e-5)
    assert runs.losses[0][-1] < runs.losses[0][0]


@pytest.mark.parametrize("name", CASES)
def test_in_float64_parameters_equal_to_the_ninth_digit(name):
    with jax.enable_x64(True):
        runs = train_both(name, np.float64, eps=1e-8)
        error = worst(*runs.params, without=runs.case.zero_grads)
    assert error < PARAMS_FP64


def test_in_bfloat16_gradients_are_those_of_float32_within_its_precision(runs):
    policy = fsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16)
    plan = runs.case.plan(fsdp.make_mesh(), mp_policy=policy)
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), batch())
    _, grads = sharded_gradients(runs.case, plan, low)
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(grads))
    got, want = (
        np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])
        for tree in (grads, runs.grads[1])
    )
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert 1e-4 < error < GRADS_BF16  # The lower bound: it did compute in bfloat16.


def test_every_replica_of_every_output_is_the_same(runs):
    for name, leaf in named_leaves(runs.state):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        pieces: dict[str, list[np.ndarray]] = {}
        for shard in leaf.addressable_shards:
            pieces.setdefault(str(shard.index), []).append(np.asarray(shard.data))
        for first, *others in pieces.values():
            same = all(np.array_equal(first, other) for other in others)
            assert same, name


@pytest.mark.parametrize(
    "sizes", [{"dp_outer": 2}, {"ep": 2}, {"dp_outer": 2, "ep": 2}]
)
def test_other_meshes_compute_the_same(sizes):
    case, data = CASES["nnx scanned"], batch()
    results = []
    for mesh in (fsdp.make_mesh(**sizes), fsdp.make_mesh(devices=jax.devices()[:1])):
        results.append(sharded_gradients(case, case.plan(mesh), data)[1])
    error = worst(*results, without=case.zero_grads)
    assert error < GRADS_FP32


@pytest.mark.parametrize("num_microbatches", [2, 4])
def test_microbatches_equal_one_big_batch(num_microbatches):
    case, data = CASES["nnx scanned"], batch(rows=32)
    plan = case.plan(fsdp.make_mesh())
    loss, grads = sharded_gradients(case, plan, data, num_microbatches=num_microbatches)
    want_loss, want = sharded_gradients(case, plan, data)
    error = worst(grads, want, without=case.zero_grads)
    assert error < GRADS_FP32
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
