"""What the library hands to a loss and takes from it: keys, and counts of tokens."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fsdp_jax as fsdp

MESH = fsdp.make_mesh(devices=jax.devices()[:2])
X = np.random.default_rng(0).normal(size=(8, 4))


def make(key):
    return {"w": jax.random.normal(key, (4, 4))}


def noisy(p, x, key):
    return jnp.mean(x @ p["w"]) * 0 + jax.random.uniform(key, ())


def wrapped(fn):
    @functools.wraps(fn)
    def call(*args, **kwargs):
        return fn(*args, **kwargs)

    return call


KEY = jax.random.key(7)
BOUND = {
    "partial": functools.partial(noisy, key=KEY),
    "partial of a partial": functools.partial(functools.partial(noisy, key=KEY)),
    "wrapped partial": wrapped(functools.partial(noisy, key=KEY)),
    "partial of a wrapper": functools.partial(wrapped(noisy), key=KEY),
    "tree_util.Partial": jax.tree_util.Partial(noisy, key=KEY),
}


@pytest.mark.parametrize("how", BOUND)
@pytest.mark.parametrize("use", ["value_and_grad", "eval", "forward"])
def test_a_key_that_is_bound_to_a_function_is_the_one_it_gets(how, use):
    plan = fsdp.fully_shard(make, MESH)
    params, fn, other = fsdp.init_params(plan, KEY), BOUND[how], jax.random.key(1)
    if use == "value_and_grad":
        (got, _), _ = fsdp.value_and_grad(plan, fn)(params, X, key=other)
    elif use == "eval":
        got = fsdp.make_eval_step(plan, fn)(params, X, key=other)["loss"]
    else:
        got = fsdp.make_forward(plan, fn)(params, X, key=other)
    # Every rank draws the same number, whose mean is exact.
    assert float(got) == float(jax.random.uniform(KEY, ()))


def test_a_function_with_an_unbound_key_gets_one_of_each_rank():
    plan = fsdp.fully_shard(make, MESH)
    params = fsdp.init_params(plan, KEY)
    fn = functools.partial(wrapped(noisy))
    (got, _), _ = fsdp.value_and_grad(plan, fn)(params, X, key=KEY)
    assert float(got) != float(jax.random.uniform(KEY, ()))


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("zero_dp_strategy", [1, 3])
def test_counts_of_tokens_are_as_exact_as_the_loss(num_microbatches, zero_dp_strategy):
    """A count beyond float32 in a float64 model: 2**24 + 1 tokens on each rank."""
    with jax.enable_x64(True):
        tokens = 2**24 + 1

        def loss_fn(p, x):
            return jnp.sum((x @ p["w"]) ** 2), tokens

        def plain(p):
            return jnp.sum((X @ p["w"]) ** 2) / (2 * num_microbatches * tokens)

        config = fsdp.FSDPConfig(zero_dp_strategy=zero_dp_strategy)
        plan = fsdp.fully_shard(make, MESH, config=config)
        params = fsdp.init_params(plan, KEY)
        assert params["w"].dtype == jnp.float64
        step = fsdp.value_and_grad(
            plan,
            loss_fn,
            num_microbatches=num_microbatches,
            calculate_per_token_loss=True,
        )
        (loss, _), grads = step(params, X)
        want, want_grads = jax.value_and_grad(plain)(fsdp.unshard(params))
        assert loss.dtype == jnp.float64
        # float32 would be off by 6e-8.
        np.testing.assert_allclose(loss, want, rtol=1e-12)
        np.testing.assert_allclose(grads["w"], want_grads["w"], rtol=1e-12)
