"""What `make test` runs follows from what tests cost, and stays within its budget."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import tiers

ROOT = Path(__file__).parents[1]


def test_the_default_tier_keeps_within_its_budget():
    durations = tiers.read_durations()
    spent = tiers.default_seconds(durations, tiers.laws())
    assert spent <= tiers.BUDGET, "make tests lighter, then `make durations`"


def test_nearly_every_law_has_been_measured():
    present = tiers.laws()
    measured = {tiers.law_of(test) for test in tiers.read_durations()}
    assert len(present - measured) <= 0.1 * len(present), "run `make durations`"


COSTS = {
    "tests/a.py::test_light": 0.1,
    "tests/a.py::test_grid[a]": 3.0,
    "tests/a.py::test_grid[b]": 0.8,
    "tests/a.py::test_mixed[a]": 0.2,
    "tests/a.py::test_mixed[b]": 2.0,
    "tests/b.py::test_heavy": 60.0,
}


def test_light_tests_and_the_cheapest_case_of_each_law_are_in_the_default_tier():
    assert {test.partition("::")[2] for test in tiers.default_tier(COSTS)} == {
        "test_light",
        "test_grid[b]",
        "test_mixed[a]",
    }


def test_a_test_that_was_never_measured_is_in_the_default_tier():
    new = "tests/b.py::test_new"
    assert tiers.slow_tests([new, *COSTS], COSTS) == {
        "tests/a.py::test_grid[a]",
        "tests/a.py::test_mixed[b]",
        "tests/b.py::test_heavy",
    }


def test_a_law_runs_its_cheapest_cases_and_at_least_one_by_default():
    cases = {
        "tests/a.py::test_grid[a]": 2.0,
        "tests/a.py::test_grid[b]": 1.0,
        "tests/a.py::test_grid[c]": 30.0,
        "tests/a.py::test_heavy[x]": 60.0,
        "tests/a.py::test_heavy[y]": 70.0,
        "tests/a.py::test_light[z]": 0.1,
        "tests/b.py::test_single": 80.0,
    }
    assert {test.partition("::")[2] for test in tiers.grid(cases)} == {
        "test_grid[c]",
        "test_heavy[y]",
    }


def test_laws_that_share_what_a_case_costs_run_the_same_cases():
    shared = {
        "tests/a.py::test_one[a]": 20.0,
        "tests/a.py::test_one[b]": 5.0,
        "tests/a.py::test_two[a]": 0.1,
        "tests/a.py::test_two[b]": 0.1,
        "tests/b.py::test_other[a]": 0.1,
    }
    later = {**shared, "tests/a.py::test_one[a]": 0.1, "tests/a.py::test_two[a]": 20.0}
    left = {"tests/a.py::test_one[a]", "tests/a.py::test_two[a]"}
    assert tiers.grid(shared) == tiers.grid(later) == left


def test_new_laws_count_and_those_that_are_gone_do_not():
    present = {"tests/a.py::test_light", "tests/a.py::test_grid", "tests/b.py::new"}
    seconds = tiers.default_seconds(COSTS, present)
    assert seconds == pytest.approx(0.1 + 0.8 + tiers.UNMEASURED)


def test_laws_are_read_from_the_sources_but_for_the_long_ones(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text(
        "import pytest\n"
        "def test_one(): ...\n"
        "def helper(): ...\n"
        "@pytest.mark.long\n"
        "def test_long(): ...\n"
    )
    (tmp_path / "tests" / "test_b.py").write_text(
        "import pytest\npytestmark = pytest.mark.long\ndef test_two(): ...\n"
    )
    assert tiers.laws(tmp_path / "tests") == {"tests/test_a.py::test_one"}


def test_a_report_of_pytest_becomes_durations(tmp_path):
    """Also: what a test costs is its own CPU time and its children's, not its wait."""
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["helpers.cpu_time"]')
    (tmp_path / "test_a.py").write_text(
        "import subprocess, sys, time, pytest\n"
        "@pytest.mark.parametrize('x', ['a::b'])\n"
        "def test_waits(x): time.sleep(0.5)\n"
        "def test_has_a_child():\n"
        "    code = 'import time\\nwhile time.process_time() < 0.4: pass'\n"
        "    subprocess.run([sys.executable, '-c', code], check=True)\n"
    )
    report, out = tmp_path / "junit.xml", tmp_path / "durations.json"
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}"]
    options = ["-c", "/dev/null", f"--rootdir={tmp_path}", "-o", "pythonpath="]
    subprocess.run(
        [*command, *options, tmp_path],
        check=True,
        capture_output=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT / "tests"), "PATH": "/usr/bin:/bin"},
    )
    tiers.write_durations(tiers.junit_durations(report), out)
    durations = tiers.read_durations(out)
    assert durations.keys() == {
        "test_a.py::test_waits[a::b]",
        "test_a.py::test_has_a_child",
    }
    assert durations["test_a.py::test_waits[a::b]"] < 0.2
    assert 0.3 < durations["test_a.py::test_has_a_child"] < 3


def test_every_recorded_test_is_named_as_pytest_names_it():
    for test in tiers.read_durations():
        file, _, name = test.partition("::")
        assert file.startswith("tests/") and name.startswith("test_"), test


def test_no_test_chooses_its_tier_by_hand():
    for file in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            by_hand = isinstance(node, ast.Attribute) and (
                ast.unparse(node) == "pytest.mark.slow"
            )
            assert not by_hand, f"{file}:{node.lineno}"


def test_what_was_recorded_is_kept_of_files_that_are_there_and_not_measured_anew(
    tmp_path,
):
    for name in ("a", "b"):
        (tmp_path / f"{name}.py").touch()
    old = {"a.py::x": 1.0, "a.py::y": 1.0, "b.py::x": 1.0, "c.py::x": 1.0}
    of_the_grid = {"a.py::z[1]": 30.0, "a.py::z[2]": 40.0}
    new = {"a.py::x": 2.0, "a.py::z[1]": 20.0}
    assert tiers.merged(old | of_the_grid, new, tmp_path) == {
        "a.py::x": 2.0,
        "a.py::z[1]": 20.0,
        "a.py::z[2]": 40.0,
        "b.py::x": 1.0,
    }
