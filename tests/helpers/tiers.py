"""Which tests `make test` runs: chosen by what each was measured to cost.

`tests/durations.json` holds the CPU-seconds of every test, written by
`tests/record_durations.py` from the JUnit report of `make test-all`. The default tier
is a function of that file alone:

- every test that takes at most `LIGHT` seconds;
- of a law (a test function) without such a case, its cheapest case, if that takes at
  most `COVERING` seconds.

All others are slow: `make test-all` runs them too, but for the cases of a law beyond
`LAW` seconds: those are its grid, and long. A test that was never measured is in the
default tier, so that it runs until it is.
"""

from __future__ import annotations

import ast
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from xml.etree import ElementTree

from helpers.marks import has_module_mark

TESTS = Path(__file__).parents[1]
DURATIONS = TESTS / "durations.json"

PROPERTY = "cpu_seconds"
"""What a test's CPU time is called in the JUnit report."""

BUDGET = 900.0
"""CPU-seconds of the default tier: about 8 minutes on 2 idle cores."""
LIGHT = 0.5
COVERING = 1.0
LAW = 4.0
"""CPU-seconds that the cases of one law may take in `make test-all`."""
UNMEASURED = 1.0
"""CPU-seconds that a law counts for until it is measured."""

Durations = Mapping[str, float]
"""Test -> CPU-seconds; tests by their pytest node ids."""


def read_durations(path: Path = DURATIONS) -> dict[str, float]:
    """The recorded durations, by node id."""
    by_file = json.loads(path.read_text())
    return {
        f"{file}::{name}": seconds
        for file, tests in by_file.items()
        for name, seconds in tests.items()
    }


def write_durations(durations: Durations, path: Path = DURATIONS) -> None:
    """Writes durations, a test a line and sorted, so that a diff can be read."""
    by_file: dict[str, dict[str, float]] = {}
    for test, seconds in sorted(durations.items()):
        file, _, name = test.partition("::")
        by_file.setdefault(file, {})[name] = round(seconds, 2)
    path.write_text(json.dumps(by_file, indent=0) + "\n")


def junit_durations(report: Path) -> dict[str, float]:
    """CPU-seconds of the tests of a JUnit report, by node id.

    Raises:
      ValueError: If a test has none: it was not run with this project's conftest.
    """
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        if "classname" not in case.attrib:
            continue  # It had begun when the run was interrupted.
        file = case.attrib["classname"].replace(".", "/") + ".py"
        spent = case.find(f"properties/property[@name='{PROPERTY}']")
        if spent is None:
            raise ValueError(f"{report}: {case.attrib['name']} has no {PROPERTY}.")
        found[f"{file}::{case.attrib['name']}"] = float(spent.attrib["value"])
    return found


def merged(old: Durations, new: Durations, root: Path = TESTS.parent) -> Durations:
    """`new`, with what `old` holds of files that exist and that `new` does not name.

    Cases of the grid keep their durations too: `make test-all` does not run them.
    """
    measured = {test.partition("::")[0] for test in new}
    left = grid(old)
    kept = {
        test: seconds
        for test, seconds in old.items()
        if (file := test.partition("::")[0]) not in measured or test in left
        if (root / file).exists()
    }
    return {**kept, **new}


def law_of(test: str) -> str:
    """The test function of a node id: what stands before the brackets of a case."""
    return test.partition("[")[0]


def default_tier(durations: Durations) -> frozenset[str]:
    """The measured tests that `make test` runs."""
    light = {test for test, seconds in durations.items() if seconds <= LIGHT}
    covered = {law_of(test) for test in light}
    cheapest: dict[str, str] = {}
    for test, seconds in durations.items():
        law = law_of(test)
        best = cheapest.get(law)
        if law not in covered and (best is None or seconds < durations[best]):
            cheapest[law] = test
    covering = {test for test in cheapest.values() if durations[test] <= COVERING}
    return frozenset(light | covering)


def grid(durations: Durations) -> frozenset[str]:
    """The measured tests that are left to `make test-long`.

    Of each law the cheapest cases run, one at least, until they come to `LAW` seconds.
    A case costs what all laws of its file take of the same case: what they share is
    made by a fixture, for the first of them. What one law runs, all of them run.
    """
    cost: Counter[tuple[str, str]] = Counter()
    cases: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    for test, seconds in durations.items():
        if case := case_of(test):
            cost[case] += seconds
            cases[law_of(test)].append(case)
    kept = set()
    for of_law in cases.values():
        spent = 0.0
        for case in sorted(of_law, key=lambda case: (cost[case], case)):
            spent += cost[case]
            if cost[case] <= LIGHT or spent <= LAW or spent == cost[case]:
                kept.add(case)
    return frozenset(t for t in durations if (c := case_of(t)) and c not in kept)


def case_of(test: str) -> tuple[str, str] | None:
    """The file and the case of a node id; None for a law of one case."""
    law, bracket, case = test.partition("[")
    return (law.partition("::")[0], case) if bracket else None


def slow_tests(tests: Iterable[str], durations: Durations) -> frozenset[str]:
    """Those of `tests` that were measured and are not in the default tier."""
    default = default_tier(durations)
    return frozenset(t for t in tests if t in durations and t not in default)


def laws(root: Path = TESTS) -> set[str]:
    """The test functions of the sources, by node id, but for `long` and `foreign`."""
    return {
        f"{file.relative_to(root.parent).as_posix()}::{node.name}"
        for file in root.rglob("test_*.py")
        if not has_module_mark(source := file.read_text(), "long")
        and not has_module_mark(source, "foreign")
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef)
        and node.name.startswith("test_")
        and "pytest.mark.long" not in map(ast.unparse, node.decorator_list)
    }


def default_seconds(durations: Durations, present: set[str]) -> float:
    """CPU-seconds of the default tier.

    Args:
      durations: What was measured.
      present: The laws that there are: what was measured of others no longer counts,
        and each that was not measured counts as `UNMEASURED`.
    """
    measured = {law_of(test) for test in durations}
    spent = sum(
        durations[test] for test in default_tier(durations) if law_of(test) in present
    )
    return spent + UNMEASURED * len(present - measured)
