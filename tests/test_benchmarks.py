"""The benchmarks run, and what they found keeps what is said of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def results(gpus):
    files = sorted(RESULTS.glob(f"overlap_{gpus}_jax*.json"))
    assert len(files) >= 2  # both lanes
    return [json.loads(file.read_text()) for file in files]


def test_on_a_node_what_is_sent_is_hidden():
    for result in results(8):
        for found in result["compared"].values():
            assert found["exposed_of_step"] <= 0.015
            assert found["faster_than_annotations"] >= 1.25
            assert found["compute_of_plain_scan"] <= 1.01
            assert found["temporaries_of_plain_scan"] <= 1.12


def test_between_nodes_most_of_it_is():
    for result in results(64):
        assert result["compared"]["fsdp_jax"]["exposed_of_step"] < 0.15
        assert result["compared"]["fsdp_jax_hsdp"]["exposed_of_step"] < 0.05


def test_all_forms_were_compiled_and_replayed_alike():
    for result in (*results(8), *results(64)):
        assert result["cost_model"]["flops"] == 790e12
        assert len(result["rows"]) == 6
        assert {"jax", "jaxlib", "jax-cuda12-plugin"} <= set(result["versions"])
        floors = [row["floor_ms"] / row["step_ms"] for row in result["rows"]]
        assert max(floors) <= 1


@pytest.mark.torch
def test_the_check_of_a_gpu_runs_through_in_rehearsal(tmp_path):
    out = tmp_path / "check.json"
    script = ROOT / "benchmarks" / "gpu_check.py"
    subprocess.run(
        [sys.executable, script, "--rehearse", "--out", out],
        check=True,
        capture_output=True,
        cwd=ROOT,
    )
    found = json.loads(out.read_text())
    assert found["fsdp_jax"]["last_loss"] < found["fsdp_jax"]["first_loss"]
    assert found["fsdp_jax"]["tokens_per_s"] > 0
    assert found["fsdp2"]["median_step_s"] > 0
