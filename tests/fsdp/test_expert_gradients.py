"""Gradients of experts are scaled as those of dense weights, whatever `ep` is.

Megatron's table (`DistributedDataParallelConfig`): an expert sees the tokens of all
ranks on `ep`, so its gradient is summed over fewer ranks than a dense one, and yet
divided by as many.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.compare import host
from helpers.experts import RULES, batch, loss_of, plan_of

import fsdp_jax as fsdp

EXPERTS = {"experts": 0}
MESHES = {
    "ep 2": {"ep": 2},
    "hsdp x ep 2": {"dp_outer": 2, "ep": 2},
    "ep 8": {"ep": 8},
}


def plan_of_two(sizes, **config):
    return fsdp.fully_shard(
        lambda key: {"experts": jnp.ones((8, 8)), "dense": jnp.ones((8, 8))},
        fsdp.make_mesh(**sizes),
        config=fsdp.FSDPConfig(expert_parallel=EXPERTS, **config),
    )


def grads_of(plan, loss, x, **options):
    params = fsdp.init_params(plan, jax.random.key(0))
    compute = fsdp.value_and_grad(plan, loss, **options)
    return host(compute(params, {"x": x})[1])


def ranks_of(mesh):
    """The number of each rank, as rows of a batch reach it, by its place on `ep`."""
    return np.arange(8).reshape(-1, mesh.shape["ep"])


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("strategy", range(4))
def test_gradients_of_two_to_the_rank_sum_over_the_ranks_of_an_expert(name, strategy):
    # The sum tells which ranks took part, each once: those with the same experts.
    def loss(weights, batch):
        total = weights["experts"].sum() + weights["dense"].sum()
        return total * batch["x"].sum(), batch["x"].shape[0]

    plan = plan_of_two(MESHES[name], zero_dp_strategy=strategy)
    x = 2.0 ** np.arange(8, dtype=np.float32)
    grads = grads_of(plan, loss, x, calculate_per_token_loss=True)
    by_expert = (2.0 ** ranks_of(plan.mesh)).sum(0)
    want = np.repeat(by_expert, 8 // len(by_expert))[:, None] / 8
    np.testing.assert_array_equal(grads["experts"], np.broadcast_to(want, (8, 8)))
    np.testing.assert_array_equal(grads["dense"], np.full((8, 8), 255 / 8))


@pytest.mark.parametrize("name", ["hsdp x ep 2", "ep 8"])
@pytest.mark.parametrize("strategy", range(4))
@pytest.mark.parametrize(
    "num_microbatches, per_token", [(1, False), (2, False), (2, True)]
)
def test_the_gradient_of_a_mean_is_one_wherever_experts_lie(
    name, strategy, num_microbatches, per_token
):
    # Upstream: a buffer filled with ep, for the tokens of so many ranks, reduces to 1.
    plan = plan_of_two(MESHES[name], zero_dp_strategy=strategy)
    ep = plan.mesh.shape["ep"]

    def loss(weights, batch):
        tokens = batch["x"].shape[0]
        mean = (
            ep * weights["experts"].sum() + weights["dense"].sum() + 0 * batch["x"][0]
        )
        return (mean * tokens, tokens) if per_token else mean

    x = np.ones(16, np.float32)
    grads = grads_of(
        plan,
        loss,
        x,
        num_microbatches=num_microbatches,
        calculate_per_token_loss=per_token,
    )
    np.testing.assert_array_equal(grads["experts"], np.ones((8, 8)))
    np.testing.assert_array_equal(grads["dense"], np.ones((8, 8)))


def test_gradients_of_the_mean_loss_are_the_same_for_every_ep():
    def grads(ep):
        plan = plan_of(fsdp.make_mesh(ep=ep), expert_parallel=RULES)
        params = fsdp.init_params(plan, jax.random.key(0))
        compute = fsdp.value_and_grad(plan, loss_of(), has_aux=True)
        return host(fsdp.sharding.unpack(compute(params, batch())[1]))

    with jax.enable_x64(True):
        want = grads(1)
        for ep in (2, 4, 8):
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, atol=1e-13),
                grads(ep),
                want,
            )


def test_an_embedder_beside_experts_has_the_sum_of_all_its_uses():
    # Upstream: 4 pipeline stages of 2 chunks with gradients 10 * stage + chunk: 124.
    def loss(weights, batch):
        uses = sum(10 * stage + chunk for stage in range(4) for chunk in range(2))
        total = uses * weights["dense"].sum() + weights["experts"].sum()
        return total + 0 * batch["x"].mean()

    for sizes in MESHES.values():
        grads = grads_of(plan_of_two(sizes), loss, np.ones(8, np.float32))
        np.testing.assert_array_equal(grads["dense"], np.full((8, 8), 124))
