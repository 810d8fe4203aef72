"""Estimates come with a range, and the range with what it rests on."""

from __future__ import annotations

import dataclasses
import types

import pytest

import fsdp_jax as fsdp
from fsdp_jax.planner import _accuracy
from fsdp_jax.planner._accuracy import Accuracy, overlap, rests_on, seconds_range
from fsdp_jax.planner._gpu import GPUS

KNOWN = Accuracy(
    rows=61,
    median=0.07,
    held_back_rows=9,
    held_back_median=0.09,
    held_back_percentile_90=0.2,
    gpus={"h100": 60, "h200": 1},
    axes={"dp_outer": 4, "tp": 2},
)


@pytest.fixture(autouse=True)
def known(monkeypatch):
    monkeypatch.setattr(_accuracy, "PUBLISHED", KNOWN)


def test_the_range_has_published_runs_at_both_ends():
    low, high = seconds_range(12.0)
    # An estimate that is 20 % too high, and one that is 20 % too low.
    assert low * 1.2 == pytest.approx(12.0) == high * 0.8


@pytest.mark.parametrize(
    "a, b, shared",
    [((1, 2), (1.5, 3), True), ((1, 2), (2, 3), True), ((1, 2), (2.1, 3), False)],
)
def test_ranges_overlap_if_they_share_a_value(a, b, shared):
    assert overlap(a, b) == overlap(b, a) == shared


def test_what_no_published_run_had_is_named():
    said = rests_on(GPUS["h100"], {"dp_shard": 8, "tp": 8, "ep": 1})
    assert "7%" in said and "61" in said and "9%" in said
    assert "none" not in said
    assert rests_on(GPUS["h200"], {"dp_shard": 8}).endswith("only 1 on h200")
    missing = rests_on(GPUS["gb200"], {"dp_shard": 8, "ep": 8, "cp": 2})
    for fact in ("none with ep", "none with cp", "none on gb200: not validated"):
        assert fact in missing


def test_an_estimate_without_error_has_no_range(monkeypatch):
    exact = dataclasses.replace(KNOWN, held_back_percentile_90=0.0)
    monkeypatch.setattr(_accuracy, "PUBLISHED", exact)
    assert seconds_range(3.0) == (3.0, 3.0)


def test_meshes_whose_ranges_overlap_tie():
    def estimate(seconds, *, fits=True):
        return types.SimpleNamespace(
            timeline=types.SimpleNamespace(seconds=seconds), compiled_bytes=1, fits=fits
        )

    found = fsdp.planner.Sweep(
        {
            "best": estimate(1.0),
            "near": estimate(1.2),
            "far": estimate(1.6),
            "large": estimate(0.9, fits=False),
        }
    )
    # 20 % off either way: 1.0 may be 1.25, 1.2 may be 1.0, 1.6 is at least 1.33.
    assert found.recommended == "best"
    assert found.ties == ("near",)
