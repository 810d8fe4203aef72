"""Which steps are kept: the best too; policies that cannot work are refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.errors import facts
from orbax.checkpoint.checkpoint_managers import (
    AnyPreservationPolicy,
    BestN,
    LatestN,
)

import fsdp_jax as fsdp
from fsdp_jax.checkpoint import _keep_best


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
    save_all(tmp_path, tiny_state, LOSSES, **options)
    assert kept_in(tmp_path) == kept


def save_all(path, state, losses, name="loss", **options):
    policy = fsdp.checkpoint.KeepBest(path, name, **options)
    with fsdp.Checkpointer(path, preservation_policy=policy) as checkpointer:
        for step, loss in losses.items():
            stepped = dataclasses.replace(state, step=jnp.int32(step))
            metadata = {} if loss is None else {"loss": loss}
            checkpointer.save(step, stepped, metadata=metadata)
            checkpointer.wait()


def kept_in(path):
    return {int(folder.name) for folder in path.iterdir() if folder.is_dir()}


@pytest.mark.parametrize(
    "number", [np.float32, np.float64, int, np.int64, np.array, np.float16]
)
def test_a_number_of_any_type_is_compared(number, tmp_path, tiny_state):
    losses = {step: number(loss) for step, loss in enumerate([3.0, 1, 2, 4, 5], 1)}
    save_all(tmp_path, tiny_state, losses)
    assert kept_in(tmp_path) == {2, 5}


def test_all_are_kept_where_no_step_has_the_number(tmp_path, tiny_state, caplog):
    save_all(tmp_path, tiny_state, {1: 3.0, 2: 1.0, 3: 2.0}, name="eval-loss")
    assert kept_in(tmp_path) == {1, 2, 3}
    assert "'eval-loss'" in caplog.text


def test_a_step_that_cannot_be_read_is_kept(tmp_path, tiny_state, caplog, monkeypatch):
    read = _keep_best.load_metadata

    def failing(path, *, step):
        if step == 2:
            raise OSError("Stale file handle")
        return read(path, step=step)

    monkeypatch.setattr(_keep_best, "load_metadata", failing)
    save_all(tmp_path, tiny_state, {1: 3.0, 2: 1.0, 3: 2.0, 4: 5.0})
    assert kept_in(tmp_path) == {2, 3, 4}
    assert "step 2 is kept" in caplog.text and "Stale" in caplog.text


@pytest.mark.parametrize("best", ["min", "lowest", None])
def test_another_best_is_refused(best):
    with pytest.raises(ValueError, match=facts(f"KeepBest(best={best!r})", "'least'")):
        fsdp.checkpoint.KeepBest("run", "loss", best=best)


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
