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


def decoder(name):
    file = RESULTS / f"overlap_{name}_jax0.10.2.json"
    (row,) = json.loads(file.read_text())["rows"]
    return row


def test_a_model_of_70_billion_over_tp_waits_for_its_tokens_not_its_weights():
    row = decoder("llama-3-70b")
    assert row["mesh"] == {"dp_shard": 8, "tp": 8}
    assert row["floor_ms"] < row["step_ms"]
    assert row["exposed_of_step"] < 0.27
    # What is gathered between nodes is hidden; what a layer reads and makes is not.
    weights, tokens = row["over"]["dp_shard"], row["over"]["tp"]
    assert weights["exposed_ms"] < 0.2 * weights["wire_ms"]
    assert tokens["wire_ms"] < weights["wire_ms"]


def test_a_model_of_70_billion_in_stages_waits_for_its_turn_not_for_the_wire():
    row = decoder("llama-3-70b-pp")
    assert row["mesh"] == {"pp": 4, "dp_shard": 16} and row["gpus"] == 64
    assert row["bubble"] == pytest.approx(3 / 19, abs=1e-4)
    assert row["exposed_of_step"] < 0.08
    assert row["floor_ms"] <= row["step_ms"] < 1.08 * row["floor_ms"]
    # Between stages tokens alone travel, beside the parts of what is in no stage.
    assert row["over"]["pp"]["wire_ms"] < 0.01 * row["step_ms"]
    assert row["temporaries_gb"] < 90


def test_of_mixtral_over_ep_and_fsdp_most_of_what_is_sent_is_hidden():
    row = decoder("mixtral-8x7b")
    assert row["mesh"] == {"dp_shard": 8, "ep": 8} and row["gpus"] == 64
    assert row["exposed_of_step"] < 0.1
    assert row["floor_ms"] <= row["step_ms"]
    # Over ep alone tokens travel, within a node; experts' weights over dp_shard alone.
    assert set(row["over"]) == {"dp_shard x ep", "dp_shard", "ep"}
    assert row["over"]["ep"]["wire_ms"] < row["over"]["dp_shard"]["wire_ms"]


def test_of_a_row_of_131072_tokens_over_cp_all_that_goes_round_is_hidden():
    row = decoder("llama-3-8b-cp")
    assert row["mesh"] == {"cp": 8} and row["tokens_a_sequence"] == 131072
    assert row["exposed_of_step"] < 0.01
    assert row["floor_ms"] <= row["step_ms"]
    # It would be, too, if attention took as long as its products do at full speed.
    assert row["over"]["cp"]["wire_ms"] < 0.2 * 3000
    assert row["temporaries_gb"] < 30


def imported():
    return json.loads((RESULTS / "import.json").read_text())


def test_an_import_takes_little_memory_beside_what_it_loads():
    compared = imported()["compared"]
    assert compared["peak_above_destination_mb"] <= 256 + compared["two_tensors_mb"]


def test_one_host_of_eight_reads_an_eighth_of_the_disk():
    assert imported()["compared"]["disk_of_an_eighth"] <= 1.1


def test_an_import_and_an_export_are_nearly_as_fast_as_the_disk():
    compared = imported()["compared"]
    assert compared["cold_of_raw_read"] <= 1.25
    assert compared["warm_of_safetensors_device_put"] <= 0.5
    assert compared["export_speed_of_raw_write"] >= 0.8


def test_a_megatron_checkpoint_is_converted_at_half_the_disks_speed_in_600_mb():
    compared = imported()["compared"]
    assert compared["conversion_speed_of_raw_copy"] >= 0.5
    assert compared["conversion_resident_mb"] < 600


def test_imports_were_compared_cold_and_warm_in_one_run():
    found = imported()
    assert found["runs"] >= 5 and found["file_bytes"] > 1e9
    rows = {(row["name"], row["cache"]): row for row in found["rows"]}
    for name in ("bridge", "safetensors_device_put", "raw_read"):
        assert rows[name, "cold"]["disk_bytes"] >= 0.99 * found["file_bytes"]
        assert rows[name, "warm"]["disk_bytes"] <= 0.01 * found["file_bytes"]
    assert {"jax", "numpy", "safetensors", "transformers"} <= set(found["versions"])


def test_weights_in_eight_bits_learned_within_1_percent_of_bfloat16():
    found = json.loads((RESULTS / "param_gather.json").read_text())
    assert found["steps"] == 200
    formats = found["formats"]
    assert not formats["bfloat16"]["gathered_in_fewer_bits"]
    first = formats["bfloat16"]["losses_of_the_first"]
    assert len(first) == 200 and first[-1] < 0.5 * first[0]
    for kind in ("float8", "mxfp8"):
        assert len(formats[kind]["gathered_in_fewer_bits"]) == 7
        assert formats[kind]["losses_of_the_first"] != first
        ours, theirs = (sum(formats[k]["last_losses"]) for k in (kind, "bfloat16"))
        assert abs(ours / theirs - 1) < 0.01


def saved():
    return json.loads((RESULTS / "checkpoint.json").read_text())


def test_a_save_is_nearly_as_fast_as_the_disk_and_checksums_cost_it_little():
    compared = saved()["compared"]
    assert compared["save_of_dd"] >= 0.9
    assert compared["save_of_no_checksums"] >= 0.95


def test_a_cold_load_is_more_than_half_as_fast_as_the_disk_and_faster_than_orbax():
    compared = saved()["compared"]
    assert compared["load_of_dd"] >= 0.6
    assert compared["load_of_orbax"] >= 1.6


def test_saving_in_the_background_keeps_the_loop_no_longer_than_a_copy():
    assert saved()["compared"]["blocked_of_copy_to_host"] <= 1.2


def test_saving_and_loading_take_little_memory_beside_the_state():
    found, peak = saved(), saved()["peak_memory_gb"]["fsdp_jax"]
    assert peak["save"] <= 0.1
    assert peak["load"] <= found["gigabytes"] + 16 * 2**25 / 1e9


def test_checkpoints_were_compared_in_turns_of_one_run():
    found = saved()
    assert found["rounds"] >= 5 and found["gigabytes"] > 1.1
    for name in ("fsdp_jax", "no checksums", "orbax", "np.save", "dd", "torch dcp"):
        assert len(found["seconds"][name]["save"]) == found["rounds"]
    assert {"jax", "orbax-checkpoint", "tensorstore", "torch"} <= set(found["versions"])


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
    for name in ("offload", "float8_gather", "mxfp8_gather"):
        assert found["variants"][name]["median_step_s"] > 0
    assert found["experts"]["worst_difference"] < 0.01
