"""Which steps are kept: the best too; policies that cannot work are refused."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers.errors import facts
from orbax.checkpoint.checkpoint_managers import (
    AnyPreservationPolicy,
    BestN,
    LatestN,
)

import fsdp_jax as fsdp


@pytest.mark.parametrize("keeps_others", [True, False])
@pytest.mark.parametrize("is_nested", [True, False])
def test_a_policy_that_ranks_steps_by_metrics_is_refused(
    keeps_others, is_nested, tmp_path
):
    policy = BestN(
        get_metric_fn=lambda metrics: metrics["loss"],
        n=3,
        keep_checkpoints_without_metrics=keeps_others,
    )
    if is_nested:
        policy = AnyPreservationPolicy(policies=[LatestN(n=2), policy])
    with pytest.raises(ValueError, match=facts("BestN(n=3)", "KeepBest", "LatestN")):
        fsdp.Checkpointer(tmp_path, preservation_policy=policy)
    assert not list(tmp_path.iterdir())


LOSSES = {1: 5.0, 2: 3.0, 3: None, 4: 3.0, 5: 4.0, 6: float("nan"), 7: 6.0}


@pytest.mark.parametrize(
    "options, kept",
    [
        ({"n": 1}, {4, 7}),  # Of equal ones the later; and the newest.
        ({"n": 3}, {2, 4, 5, 7}),
        ({"n": 1, "best": "greatest"}, {1, 7}),
    ],
)
def test_the_best_steps_are_kept_and_the_newest(options, kept, tmp_path, tiny_state):
    policy = fsdp.checkpoint.KeepBest(tmp_path, "loss", **options)
    with fsdp.Checkpointer(tmp_path, preservation_policy=policy) as checkpointer:
        for step, loss in LOSSES.items():
            state = dataclasses.replace(tiny_state, step=jnp.int32(step))
            metadata = {} if loss is None else {"loss": loss}
            checkpointer.save(step, state, metadata=metadata)
    names = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert names == {str(step) for step in kept}


def test_no_step_to_keep_is_refused():
    with pytest.raises(ValueError, match=facts("KeepBest(n=0)", 1)):
        fsdp.checkpoint.KeepBest("run", "loss", n=0)


@pytest.fixture(scope="module")
def tiny_state():
    plan = fsdp.fully_shard(
        lambda key: {"w": jax.random.normal(key, (8, 2))}, fsdp.make_mesh()
    )
    params = fsdp.init_params(plan, jax.random.key(0))
    return fsdp.init_state(plan, optax.sgd(1.0), params)
