"""Models of other packages train sharded as they do alone (`make test-foreign`)."""

from __future__ import annotations

import functools
import importlib.metadata

import jax
import pytest
from helpers.foreign_table import PAGE, table
from helpers.published import PUBLISHED, Published
from helpers.trials import (
    Trained,
    Trial,
    check_audit,
    check_numbers,
    check_saved,
    check_stored,
    train,
)

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


@pytest.mark.parametrize("published", PUBLISHED.values(), ids=NAMES)
def test_the_page_says_what_was_tried(published: Published):
    version = importlib.metadata.version(published.package)
    assert f"{published.package} {version}" in table(PAGE.read_text())[published.model]
