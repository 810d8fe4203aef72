"""What Megatron's finalize_model_grads does: free in JAX, or done by a function."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.errors import facts

import fsdp_jax as fsdp
from fsdp_jax import ops

RATE = 0.25


class Router(nnx.Module):
    """Counts tokens and proposals; a real one would also choose by them."""

    def __init__(self, rngs):
        self.weight = nnx.Param(jnp.ones((8,)))
        self.bias = nnx.Variable(jnp.zeros(2))
        self.tokens = fsdp.step.Tally(jnp.zeros(2, jnp.int32))
        self.beta = nnx.Variable(jnp.array([0.5, -0.5]))
        self.proposed = fsdp.step.Tally(jnp.zeros(2))
        self.forwards = fsdp.step.Tally(jnp.zeros((), jnp.int32))

    def __call__(self, batch):
        self.tokens[...] += batch["tokens"].sum(0)
        self.proposed[...] += batch["proposal"].mean(0)
        self.forwards[...] += 1
        return (self.weight[...] ** 2).sum() * batch["tokens"].size


def finish(ema):
    def update(router):
        bias = ops.update_expert_bias(router.bias[...], router.tokens[...], RATE)
        router.bias[...] = bias
        router.beta[...] = ops.update_qb_beta(
            router.beta[...], router.proposed[...], router.forwards[...], ema
        )
        for tally in (router.tokens, router.proposed, router.forwards):
            tally[...] = jnp.zeros_like(tally[...])

    return update


def loss_fn(model, batch):
    return model(batch).astype(jnp.float32)


def trained(update, batch, num_microbatches=1, steps=1):
    plan = fsdp.fully_shard(
        lambda key: Router(nnx.Rngs(key)), fsdp.make_mesh(dp_outer=2, ep=2), [Router]
    )
    tx = optax.sgd(0.1)
    step = fsdp.make_train_step(
        plan, loss_fn, tx, num_microbatches=num_microbatches, update_model_state=update
    )
    state = fsdp.init_state(plan, tx, fsdp.init_params(plan, jax.random.key(0)))
    for _ in range(steps):
        state, _ = step(state, batch)
    return plan, state


def batch(rows=16):
    tokens = np.zeros((rows, 2), np.int32)
    tokens[0] = [0, 2]  # one row of one rank; all others route nothing
    proposal = np.random.default_rng(0).normal(size=(rows, 2)).astype("f")
    return {"tokens": tokens, "proposal": proposal}


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_the_expert_bias_follows_the_tokens_of_all_ranks(num_microbatches):
    _, state = trained(finish(0.0), batch(), num_microbatches)
    router = state.model_state
    np.testing.assert_array_equal(router["bias"][...], [0.25, -0.25])
    np.testing.assert_array_equal(router["tokens"][...], [0, 0])


def test_an_expert_with_the_mean_keeps_its_bias():
    bias = ops.update_expert_bias(jnp.ones(3), jnp.array([4, 6, 2]), RATE)
    np.testing.assert_array_equal(bias, [1.0, 0.75, 1.25])


@pytest.mark.parametrize("ema", [0.0, 0.9])
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_qb_beta_is_the_centred_mean_over_ranks_and_forwards(ema, num_microbatches):
    rows = batch()
    _, state = trained(finish(ema), rows, num_microbatches)
    # Every rank and microbatch has as many rows, so the mean of means is the mean.
    want = ema * np.array([0.5, -0.5]) + (1 - ema) * rows["proposal"].mean(0)
    want -= want.mean()
    np.testing.assert_allclose(state.model_state["beta"][...], want, atol=1e-6)
    np.testing.assert_array_equal(state.model_state["forwards"][...], 0)


def test_tallies_sum_over_ranks_and_microbatches_and_steps():
    _, state = trained(None, batch(), num_microbatches=2, steps=3)
    assert int(state.model_state["forwards"][...]) == 8 * 2 * 3
    np.testing.assert_array_equal(state.model_state["tokens"][...], [0, 6])


def test_without_an_update_the_bias_is_frozen():
    _, state = trained(None, batch())
    np.testing.assert_array_equal(state.model_state["bias"][...], [0, 0])


def test_evaluation_leaves_the_router_as_it_was():
    plan, state = trained(None, batch())
    before = jax.tree.map(np.asarray, state.model_state)
    evaluate = fsdp.make_eval_step(plan, loss_fn)
    evaluate(
        state.params, batch(), key=jax.random.key(0), model_state=state.model_state
    )
    jax.tree.map(np.testing.assert_array_equal, before, state.model_state)


def test_an_update_that_changes_what_the_model_holds_is_refused():
    def update(router):
        router.extra = nnx.Variable(jnp.zeros(2))

    with pytest.raises(ValueError, match=facts("update_model_state")):
        trained(update, batch())


# Gradients that Megatron sums by hand are those of one array used in many places.


def test_a_replicated_embedder_has_the_sum_of_all_its_uses():
    # Upstream: 4 pipeline stages of 2 chunks with gradients 10 * stage + chunk: 124.
    def loss(weights, batch):
        total = sum(
            (10 * stage + chunk) * weights["embedder"].sum()
            for stage in range(4)
            for chunk in range(2)
        )
        return total + 7 * weights["other"].sum() + 0 * batch["x"].mean()

    def make(key):
        return {"embedder": jnp.ones((8, 8)), "other": jnp.ones(8)}

    for mesh in (fsdp.make_mesh(), fsdp.make_mesh(dp_outer=2)):
        plan = fsdp.fully_shard(make, mesh)
        params = fsdp.init_params(plan, jax.random.key(0))
        x = np.ones((8, 2), np.float32)
        _, grads = fsdp.value_and_grad(plan, loss)(params, {"x": x})
        np.testing.assert_array_equal(grads["embedder"], np.full((8, 8), 124))
        np.testing.assert_array_equal(grads["other"], np.full(8, 7))


@pytest.mark.parametrize("strategy", range(4))
def test_gradients_of_two_to_the_rank_sum_exactly(strategy):
    # Each rank's gradient is 2^rank: the sum tells which ranks took part, each once.
    def loss(weights, batch):
        return (weights["w"].sum() * batch["x"].sum(), batch["x"].shape[0])

    plan = fsdp.fully_shard(
        lambda key: {"w": jnp.ones((8, 8))},
        fsdp.make_mesh(dp_outer=2),
        config=fsdp.FSDPConfig(zero_dp_strategy=strategy),
    )
    params = fsdp.init_params(plan, jax.random.key(0))
    x = 2.0 ** np.arange(8, dtype=np.float32)
    compute = fsdp.value_and_grad(plan, loss, calculate_per_token_loss=True)
    _, grads = compute(params, {"x": x})
    np.testing.assert_array_equal(grads["w"], np.full((8, 8), 255 / 8))


def test_gradients_are_averaged_over_ranks_and_microbatches():
    # Upstream: W ranks with gradient rank + 1, called twice, give W + 1 summed.
    def loss(weights, batch):
        return weights["w"].sum() * batch["x"].mean()

    plan = fsdp.fully_shard(lambda key: {"w": jnp.ones((8, 8))}, fsdp.make_mesh())
    params = fsdp.init_params(plan, jax.random.key(0))
    x = np.repeat(np.arange(1, 9, dtype=np.float32), 2)
    for num_microbatches in (1, 2):
        compute = fsdp.value_and_grad(plan, loss, num_microbatches=num_microbatches)
        _, grads = compute(params, {"x": x})
        np.testing.assert_array_equal(grads["w"], np.full((8, 8), 4.5))


class Flagged(nnx.Module):
    def __init__(self, rngs):
        self.weight = nnx.Param(jnp.ones(8))
        self.seen = nnx.Variable(jnp.array(False))

    def __call__(self, batch):
        self.seen[...] |= batch["tokens"].max() > 1
        return self.weight[...].sum() * batch["tokens"].size


def test_a_flag_is_true_for_all_if_it_is_for_one_rank():
    plan = fsdp.fully_shard(lambda key: Flagged(nnx.Rngs(key)), fsdp.make_mesh())
    tx = optax.sgd(0.1)
    step = fsdp.make_train_step(plan, loss_fn, tx)
    state = fsdp.init_state(plan, tx, fsdp.init_params(plan, jax.random.key(0)))
    state, _ = step(state, batch())
    shards = state.model_state["seen"][...].addressable_shards
    assert [bool(shard.data) for shard in shards] == [True] * 8
