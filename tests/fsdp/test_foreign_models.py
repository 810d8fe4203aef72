"""A decoder by flax's own guide trains sharded as on one device.

The models of other packages, under the same laws, are in `tests/foreign`.
"""

from __future__ import annotations

import pytest
from helpers.foreign_table import PAGE, table
from helpers.published import PUBLISHED
from helpers.trials import check_audit, check_numbers, check_saved, check_stored, train


@pytest.fixture(scope="module")
def trial():
    return PUBLISHED["scanned"].trial(16, 2, 4)


@pytest.fixture(scope="module")
def trained(trial):
    return train(trial)


def test_a_scanned_decoder_trains_as_on_one_device(trial, trained):
    check_numbers(trained)
    check_stored(trained)
    check_audit(trial, trained)


def test_a_scanned_decoder_goes_on_from_a_checkpoint(trial, trained, tmp_path):
    check_saved(trial, trained, tmp_path)


def test_every_published_model_has_a_row_on_the_page():
    rows = table(PAGE.read_text())
    for published in PUBLISHED.values():
        row = rows[published.model]
        assert published.framework in row and f"`{published.units}`" in row
        assert published.package in row
