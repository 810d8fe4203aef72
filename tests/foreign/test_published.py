"""Models of other packages train sharded as they do alone (`make test-foreign`)."""

from __future__ import annotations

import functools
import importlib.metadata

import jax
import optax
import pytest
from helpers.foreign_table import PAGE, table
from helpers.published import PUBLISHED, Published
from helpers.trials import (
    Trained,
    Trial,
    check_audit,
    check_lora,
    check_numbers,
    check_saved,
    check_stored,
    train,
)

import fsdp_jax as fsdp

# What other packages warn of is theirs.
pytestmark = [pytest.mark.foreign, pytest.mark.filterwarnings("default")]

NAMES = list(PUBLISHED)


@pytest.fixture(autouse=True)
def as_their_users_configure_jax():
    """Our own tests let jax refuse to broadcast arrays of different ranks."""
    with jax.numpy_rank_promotion("allow"):
        yield


WIDTH, LAYERS, SEQ = 32, 2, 16


@functools.cache
def trial(name: str) -> Trial:
    return PUBLISHED[name].trial(WIDTH, LAYERS, SEQ)


@functools.cache
def trained(name: str) -> Trained:
    return train(trial(name))


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_three_steps_are_those_of_one_device(name):
    check_numbers(trained(name))


@pytest.mark.parametrize("name", NAMES)
def test_each_device_stores_its_share(name):
    check_stored(trained(name))


@pytest.mark.parametrize("name", NAMES)
def test_the_compiled_step_does_what_the_plan_says(name):
    check_audit(trial(name), trained(name))


@pytest.mark.parametrize("name", NAMES)
def test_training_goes_on_from_a_checkpoint_on_half_of_the_devices(name, tmp_path):
    check_saved(trial(name), trained(name), tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_lora_trains_factors_of_its_weights(name):
    check_lora(trial(name), PUBLISHED[name].lora)


@functools.cache
def estimated(name: str, prefetch: int) -> fsdp.planner.StepEstimate:
    large = PUBLISHED[name].trial(512, 4, 256)
    config = fsdp.FSDPConfig(
        prefetch=prefetch, remat_policy=jax.checkpoint_policies.nothing_saveable
    )
    mesh = fsdp.make_mesh(devices=jax.devices()[:1])
    plan = fsdp.fully_shard(large.make_model, mesh, large.units, config)
    return fsdp.estimate_step(
        *(plan, large.loss, optax.adamw(1e-3), large.batch),
        **{"gpu": "h200", "gpus": 8, "guide": False},
    )


@pytest.mark.plan
@pytest.mark.parametrize("name", NAMES)
def test_the_step_compiled_for_gpus_does_what_the_plan_says(name):
    # Among it that at most two units are unsharded at once, each gathered by itself.
    found = estimated(name, 1)
    fsdp.audit_step(found.plan, found.compiled)


@pytest.mark.plan
@pytest.mark.parametrize("name", NAMES)
def test_no_more_of_the_step_is_exposed_than_in_the_order_of_xla(name):
    assert estimated(name, 1).exposed <= estimated(name, 0).exposed + 0.01


@pytest.mark.plan
@pytest.mark.parametrize("name", NAMES)
def test_the_predicted_memory_is_that_of_the_compiled_step(name):
    found = estimated(name, 1)
    assert found.compiled_bytes == pytest.approx(found.memory.total, rel=MEMORY)


# Predicted against compiled memory; of models this small the workspaces of single
# kernels are a part.
MEMORY = 0.25


@pytest.mark.parametrize("published", PUBLISHED.values(), ids=NAMES)
def test_the_page_says_what_was_tried(published: Published):
    version = importlib.metadata.version(published.package)
    assert f"{published.package} {version}" in table(PAGE.read_text())[published.model]
