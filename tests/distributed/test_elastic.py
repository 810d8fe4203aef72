"""An elastic job whose process is killed goes on with fewer, and grows back."""

from __future__ import annotations

import random

import pytest
from helpers.elastic import ElasticRun

from fsdp_jax.launch import ElasticConfig

# The short form of benchmarks/elastic.py.
pytestmark = [pytest.mark.distributed, pytest.mark.long]

STEPS = 24


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> dict[int, float]:
    with ElasticRun(tmp_path_factory.mktemp("whole"), STEPS) as run:
        assert run.wait() == 0, run.said
    return dict(run.losses())


@pytest.mark.parametrize("moment", ["step", "save"])
def test_no_saved_step_is_lost_and_losses_stay_the_same(
    moment, uninterrupted, tmp_path
):
    config = ElasticConfig(2, 4, rejoin_secs=float("inf"), max_restarts=1)
    with ElasticRun(tmp_path, STEPS, config) as run:
        death = run.kill(moment, after_step=3, chance=random.Random(0))
        first, _ = run.await_step_after(death)
        assert death.saved < first <= run.last_step() + 1, run.said
        run.job.grow()
        run.await_that(lambda: run.generation() == 2)
        assert run.wait() == 0, run.said
    replicas = [text for rank, text in run.lines if rank == -1 and "starts" in text]
    assert ["2 of 4" in replicas[0], "4 of 4" in replicas[1]] == [True, True]
    steps = [step for step, _ in run.losses()]
    assert sorted({*steps}) == list(range(1, STEPS + 1))
    # Growth loses none; the kill only those that were not saved yet.
    assert len(steps) - STEPS == max(steps[: death.lines]) - (first - 1)
    for step, loss in run.losses():
        # float32 sums over other devices and microbatches.
        assert loss == pytest.approx(uninterrupted[step], rel=1e-5)
