"""Benchmarks run, their results say what they are of, and they hold what is claimed."""

from __future__ import annotations

import argparse
import json
import operator
import os
import re
import subprocess
import sys
from pathlib import Path

import bit_identity
import elastic
import figures
import mutants
import pytest
import result
from helpers import compiling
from helpers.errors import facts

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"
RESULTS = BENCHMARKS / "results"
COMPARE = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, "==": operator.eq}

# File, dotted path into its JSON (* for every key or item), and the bound it meets.
# What the README and the pages say in figures is compared in test_said_figures.py.
CLAIMS = [
    "overlap_8_jax*: compared.*.exposed_of_step <= 0.015",
    "overlap_8_jax*: compared.*.faster_than_annotations >= 1.1",
    "overlap_8_jax*: compared.*.compute_of_plain_scan <= 1.1",
    "overlap_8_jax*: compared.*.temporaries_of_plain_scan <= 1.2",
    "overlap_64_jax*: compared.fsdp_jax.exposed_of_step < 0.02",
    "overlap_64_jax*: compared.fsdp_jax_hsdp.exposed_of_step < 0.02",
    "overlap_*_jax*: cost_model.flops == 629.993e12",
    "overlap_llama-3-70b_jax*: rows.*.exposed_of_step < 0.21",
    "overlap_llama-3-70b_jax*: rows.1.batch_parts == 2",
    "overlap_llama-3-70b_jax*: rows.1.exposed_of_step < 0.1",
    "overlap_llama-3-70b-pp_jax*: rows.*.exposed_of_step < 0.02",
    "overlap_llama-3-70b-pp_jax*: rows.*.temporaries_gb < 90",
    "overlap_mixtral-8x7b_jax*: rows.*.exposed_of_step < 0.03",
    "overlap_llama-3-8b-cp_jax*: rows.*.exposed_of_step < 0.01",
    "overlap_llama-3-8b-cp_jax*: rows.*.temporaries_gb < 30",
    "float8_products: models.*.float8_over_bfloat16.last_loss <= 1.01",
    "float8_products: models.*.float8_over_bfloat16.held_out_loss <= 1.02",
    "foreign: compared.*.hides_enough == 1",
    "foreign: compared.*.needs_little_more == 1",
    "foreign: compared.*.faster_than_without >= 0.99",
    "foreign: compared.*.predicted_of_compiled >= 0.9",
    "foreign: compared.*.predicted_of_compiled <= 1.11",
    "validate_planner: held_back.median <= 0.10",
    "validate_planner: held_back.percentile_90 <= 0.25",
    "import: runs >= 5",
    "import: compared.disk_of_an_eighth <= 1.1",
    "import: compared.cold_of_raw_read <= 1.25",
    "import: compared.cold_of_orbax <= 1.0",
    "import: compared.warm_of_orbax <= 1.0",
    "import: compared.cold_of_orbax_as_fsdp <= 1.0",
    "import: compared.warm_of_orbax_as_fsdp <= 1.0",
    "import: compared.peak_of_orbax < 1.0",
    "import: compared.peak_of_orbax_as_fsdp < 1.0",
    "import: compared.export_speed_of_raw_write >= 0.8",
    "import: compared.conversion_speed_of_raw_copy >= 0.5",
    "import: compared.conversion_resident_mb < 600",
    "elastic: steps_lost == 0",
    "elastic: largest_difference < 1e-6",
    "elastic_more_victims: killed_of.* >= 6",
    "elastic_more_victims: steps_lost == 0",
    "elastic_more_victims: largest_difference < 1e-6",
    "elastic_more_victims: wrong_ends == 0",
    "elastic: growths.*.steps_done_twice == 0",
    "elastic: wrong_ends == 0",
    "param_gather: steps == 200",
    "param_gather: formats.*.off_by < 0.01",
    "param_gather: formats.*.off_by >= -0.01",
    "checkpoint: rounds >= 5",
    "checkpoint: compared.save_of_no_checksums >= 0.95",
    "checkpoint: compared.save_of_dd >= 0.9",
    "checkpoint: compared.load_of_dd >= 0.5",
    "checkpoint: compared.load_of_orbax >= 1.1",
    "checkpoint: compared.blocked_of_copy_to_host <= 1.2",
    "checkpoint: peak_memory_gb.fsdp_jax.save <= 0.1",
    "coordinator_fuzz: messages >= 10000",
    "coordinator_fuzz: jobs_lost == 0",
    "torture: kills.steps_lost == 0",
    "torture: flips.wrong_values_returned == 0",
    "torture: chunk_moved.wrong_values_returned == 0",
    "torture: file_of_another_step.wrong_values_returned == 0",
    "torture: folders_exchanged.wrong_values_returned == 0",
    "torture: rollbacks.steps_lost == 0",
    "torture: second_writers.steps_lost == 0",
    "checkpoint_stores: store_rounds >= 3",
    "config_fuzz: cases >= 1000",
    "config_fuzz: differ == 0",
    "composition_audit: cases >= 250",
    "composition_audit: findings == 0",
    "composition_fuzz: cases >= 2000",
    "composition_fuzz: differ == 0",
    "replay: kinds.*.false == 0",
    "replay: false_alarms == 0",
    "resharding: rows.*.exact == 1",
]


def values(found, path):
    """What stands at a dotted path; `*` is every key or item of what is there."""
    if not path:
        return [found]
    first, rest = path[0], path[1:]
    if first == "*":
        inside = found.values() if isinstance(found, dict) else found
        return [value for item in inside for value in values(item, rest)]
    inside = found[int(first)] if isinstance(found, list) else found[first]
    return values(inside, rest)


def broken(claims, folder=RESULTS):
    """The claims that a result does not meet, or that no result is there for."""
    wrong = []
    for claim in claims:
        pattern, said = claim.split(": ")
        path, sign, bound = said.split()
        files = sorted(folder.glob(f"{pattern}.json"))
        found = [
            value
            for file in files
            for value in values(json.loads(file.read_text()), path.split("."))
        ]
        if not found or not all(COMPARE[sign](v, float(bound)) for v in found):
            wrong.append(f"{claim}: {found}")
    return wrong


def test_results_hold_what_is_claimed_of_them():
    assert broken(CLAIMS) == []


def test_a_claim_that_is_not_met_is_found(tmp_path):
    (tmp_path / "a.json").write_text('{"rows": [{"x": 1}, {"x": 3}]}')
    claims = ["a: rows.*.x <= 2", "a: rows.*.x <= 3", "b: rows.*.x <= 3"]
    claims += ["a: rows.0.x <= 1", "a: rows.1.x <= 1"]
    wrong = [said.split(": ")[:2] for said in broken(claims, tmp_path)]
    assert wrong == [[*claims[at].split(": ")] for at in (0, 2, 4)]


def test_results_say_of_what_commit_machine_and_load_they_are():
    for file in RESULTS.glob("*.json"):
        found = json.loads(file.read_text())
        assert set(result.FIELDS) <= found.keys(), file.name
        assert found["commit"] is None or len(found["commit"]) == 40, file.name
        complete = None not in (found["commit"], found["load"], found["date"])
        assert complete or found["forced"], file.name


def test_each_result_is_measured_anew_by_make_figures():
    assert sorted(f.name for f in figures.FIGURES) == sorted(
        file.stem for file in RESULTS.glob("*.json")
    )


@pytest.mark.parametrize("figure", figures.FIGURES, ids=lambda figure: figure.name)
def test_the_commands_of_a_figure_name_options_that_scripts_have(figure, tmp_path):
    for command in figure.commands:
        script, *words = figures.words_of(command, tmp_path, "DIR", force=False)
        source = (ROOT / script).read_text()
        options = {word for word in words if word.startswith("--")}
        defined = set(re.findall(r'"(--[a-z-]+)"', source))
        if "result.add_arguments(" in source:
            defined |= {"--out", "--force"}
        assert options <= defined


def test_a_figure_is_measured_once_for_the_same_sources(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    figure = figures.Figure("one", ("import.py",), whole=("cases", 2))
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()

    def with_commit(commit, cases):
        figure.file.write_text(json.dumps({"commit": commit, "cases": cases}))
        return figures.is_current(figure), figures.is_whole(figure)

    assert not figures.is_current(figure)
    assert with_commit("0" * 40, 2) == (False, True)
    is_committed = not subprocess.run(
        ["git", "diff", "--quiet", "HEAD", "--", "fsdp_jax", "bridge"], cwd=ROOT
    ).returncode
    assert with_commit(head, 1) == (is_committed, False)


def test_a_figure_without_its_environment_is_named(capsys):
    figure = figures.Figure("one", ("import.py",), venv="no-such-environment")
    assert not figures.measure(figure, force=False)
    assert "no-such-environment" in capsys.readouterr().out


@pytest.fixture
def quiet(monkeypatch):
    """A machine that does nothing, and a tree that is as committed."""
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(
        result, "_git", lambda *words: {"rev-parse": "0" * 40}.get(words[0], "")
    )


def args(force=False):
    return argparse.Namespace(force=force, out=None)


def test_a_benchmark_begins_on_a_quiet_machine_and_a_committed_tree(quiet, capsys):
    conditions = result.begin(args(), ("jax", "no-such-package"))
    result.write(args(), conditions, {"rows": [1]})
    found = json.loads(capsys.readouterr().out)
    assert list(found) == [*result.FIELDS, "rows"]
    assert found["commit"] == "0" * 40 and found["forced"] == []
    assert set(found["versions"]) == {"python", "jax"}


@pytest.mark.parametrize(
    "wrong, said",
    [("load", "1.0"), ("tree", "fsdp_jax/sharding/_mesh.py"), ("commit", "git")],
)
def test_otherwise_it_is_refused_and_forced_says_so(
    quiet, monkeypatch, capsys, wrong, said
):
    cpus = os.cpu_count()
    if wrong == "load":
        monkeypatch.setattr(os, "getloadavg", lambda: (0.6 * cpus, 0.0, 0.0))
    if wrong == "tree":
        monkeypatch.setattr(result, "_changed", lambda: ["fsdp_jax/sharding/_mesh.py"])
    if wrong == "commit":
        monkeypatch.setattr(result, "_git", lambda *words: "")
    with pytest.raises(SystemExit, match=facts("--force", said)):
        result.begin(args(), ())
    result.write(args(), result.begin(args(force=True), ()), {})
    assert len(json.loads(capsys.readouterr().out)["forced"]) == 1


def run_benchmark(name, *words, **environment):
    out = words[words.index("--out") + 1]
    command = [sys.executable, BENCHMARKS / name, *words]
    env = os.environ | environment
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT, env=env)
    return json.loads(Path(out).read_text())


@pytest.mark.plan
def test_a_node_hides_what_it_sends_when_compiled_anew(tmp_path):
    out = str(tmp_path / "overlap.json")
    forms = ("--forms", "annotations", "fsdp_jax", "--microbatches", "1")
    found = run_benchmark("overlap.py", *forms, "--force", "--out", out)
    compared = found["compared"]["fsdp_jax"]
    assert compared["exposed_of_step"] <= 0.015
    assert compared["faster_than_annotations"] >= 1.1
    annotations, ours = found["rows"]
    assert annotations["exposed_of_step"] > 0.1  # it could be missed
    assert max(row["floor_ms"] / row["step_ms"] for row in (annotations, ours)) <= 1


REHEARSED = (
    *("1b", "fsdp2_1b", "jit_1b", "attention", "experts", "checkpoint"),
    *("1b_experts", "1b_offload", "watchdog"),
)


@pytest.mark.torch
def test_the_check_of_a_gpu_runs_through_in_rehearsal(tmp_path):
    words = ("--rehearse", "--out", str(tmp_path / "check.json"))
    words += ("--only", *REHEARSED)
    found = run_benchmark("gpu_check.py", *words, **compiling.ENVIRONMENT)
    parts = found["parts"]
    assert [*parts] == [*REHEARSED]
    assert not [name for name, part in parts.items() if "not_run" in part]
    for name in ("1b", "jit_1b", "1b_experts", "1b_offload"):
        losses = parts[name]["losses"]
        assert losses[-1] < losses[0], name
        assert parts[name]["tokens_per_s"] > 0
    assert parts["fsdp2_1b"]["median_step_s"] > 0
    assert {"faster_than_fsdp2", "faster_than_jit"} == found["compared"].keys()
    for case in parts["attention"].values():
        if isinstance(case, dict):
            assert max(case["errors"]) < 0.01
    assert parts["experts"]["grouped_matmul"]["worst_difference"] < 0.01
    assert parts["checkpoint"]["leaves_that_differ"] == 0
    assert parts["checkpoint"]["leaves_that_differ_a_step_later"] == 0
    # CPUs have no watchdog: the program ends by itself.
    assert parts["watchdog"]["status"] == 0
    assert not parts["watchdog"]["ended_by_watchdog"]


def test_a_part_of_the_check_of_a_gpu_that_fails_says_why(tmp_path):
    out = ("--out", str(tmp_path / "check.json"))
    words = ("--force", "--only", "experts", "checkpoint", *out)
    found = run_benchmark("gpu_check.py", *words, **compiling.ENVIRONMENT)
    for part in found["parts"].values():
        assert part["status"] == 1
        assert "jax sees none" in part["not_run"][-1]
    words = ("--force", "--only", "experts", "--minutes", "0", *out)
    again = run_benchmark("gpu_check.py", *words, **compiling.ENVIRONMENT)
    assert again["parts"] == found["parts"]  # No time for another part.


SOURCE = '''
def f(x: int = 1) -> int:
    """Says 1."""
    if x < 10 and not done:
        raise ValueError(f"{x + 1} is 2")
    return lax.psum(x * 3, "dp_shard")
'''


def test_a_mutant_changes_one_expression_and_no_annotation_or_message():
    found = list(mutants.candidates("f.py", SOURCE))
    changes = {(mutant.before, mutant.after) for mutant, _, _ in found}
    assert changes == {
        ("1", "2"),
        ("x < 10", "x <= 10"),
        ("10", "11"),
        ("x < 10 and (not done)", "x < 10 or not done"),
        ("not done", "done"),
        ("lax.psum(x * 3, 'dp_shard')", "x * 3"),
        ("x * 3", "x // 3"),
        ("3", "4"),
        ("'dp_shard'", "'dp_outer'"),
    }
    for mutant, _, _ in found:
        text = mutants.planted(SOURCE, mutant)
        different = [
            (a, b)
            for a, b in zip(SOURCE.splitlines(), text.splitlines(), strict=True)
            if a != b
        ]
        assert len(different) == 1
        compile(text, "f.py", "exec")


def test_records_that_differ_in_a_bit_or_a_collective_are_told_apart():
    one = {"losses": ["0x1p+0"], "state": {"w": "a"}, "collectives": {"all-gather": 2}}
    for part, value in (
        ("losses", ["0x1.8p+0"]),
        ("state", {"w": "b"}),
        ("collectives", {"all-gather": 1, "all-reduce": 1}),
    ):
        (line,) = bit_identity.differences({"x": one}, {"x": {**one, part: value}})
        assert line.startswith(f"x: {part} differ")
    assert bit_identity.differences({"x": one}, {"x": one}) == []
    assert bit_identity.differences({"x": one}, {}) == ["x: in one record only"]


def test_only_a_run_that_gloo_ended_is_left_out_of_the_elastic_ones():
    found = {"discarded": [], "wrong_ends": 0, "wrong_end_outputs": []}
    busy = "[2] Gloo all-reduce failed: Timed out waiting 30000ms for recv operation"
    elastic.count_failed(found, 4, f"[0] step 3\n{busy}\n[launch] the job ends")
    assert found == {
        "discarded": [[4, busy]],
        "wrong_ends": 0,
        "wrong_end_outputs": [],
    }
    elastic.count_failed(found, 5, "[launch] no restart is left of 3: the job ends")
    assert len(found["discarded"]) == found["wrong_ends"] == 1
    assert found["wrong_end_outputs"] == [
        [5, "[launch] no restart is left of 3: the job ends"]
    ]
