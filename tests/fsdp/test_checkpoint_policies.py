"""Policies of Orbax's that need what a save does not have are refused by name."""

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
    with pytest.raises(ValueError, match=facts("BestN(n=3)", "LatestN")):
        fsdp.Checkpointer(tmp_path, preservation_policy=policy)
    assert not list(tmp_path.iterdir())
