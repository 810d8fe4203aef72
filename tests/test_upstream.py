"""UPSTREAM.md says of Megatron-LM's and verl's tests which of ours show the same.

What it cites exists (read from the source, nothing is imported), what it leaves out has
a reason, and it has a row for every test that `tests/upstream.json` pins.
"""

import ast
import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest
from helpers.upstream import heading, is_named_by, named_tests, read_pinned

ROOT = Path(__file__).parent.parent

# Headings that are no file of upstream's with tests of its own.
OTHERS = {
    "dist_checkpointing/models/common.py",  # what others of its folder inherit
    "dist_checkpointing/test_flattened_resharding.py",  # deleted upstream
    "Failures of checkpoints",
    "Beyond upstream",
}

HEADER = ["upstream test", "what it shows", "ours"]
# `tests/fsdp/test_x.py::test_y`
CITED = re.compile(r"`(tests/[\w/]+\.py::\w+)`")
# What stands in the place of a test, up to the next one or the end.
EXCUSE = re.compile(r"(N/A|not yet):(.*?)(?=; (?:N/A|not yet):|$)")
LEAST_WORDS = 5
# What the first cell of a row begins with: `test_x`, `TestClass`, and no more.
NAMED = re.compile(r"(?:`[\w:]+`(?:, )?)+")


@dataclasses.dataclass(frozen=True)
class Row:
    """One case of a file of upstream's tests, and what shows it here."""

    file: str
    cells: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.file}, {self.cells[0]}"

    @property
    def theirs(self) -> set[str]:
        """The tests of upstream that the row is about."""
        named = NAMED.match(self.cells[0])
        return set(re.findall(r"[\w:]+", named[0])) if named else set()

    @property
    def ours(self) -> str:
        return self.cells[-1]

    @property
    def verdict(self) -> str:
        """How much of the row tests of ours show."""
        shown, excuses = CITED.search(self.ours), dict(EXCUSE.findall(self.ours))
        if not excuses:
            return "shown"
        kind = "not yet" if "not yet" in excuses else "N/A"
        return f"shown in part, the rest {kind}" if shown else kind


def rows(text: str) -> list[Row]:
    """The rows of all tables, each with the heading above it."""
    found, file = [], ""
    for line in text.splitlines():
        if line.startswith("### "):
            file = line.removeprefix("### ").strip("`")
        elif line.startswith("|"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if cells != HEADER and not all(re.fullmatch("-+", c) for c in cells):
                found.append(Row(file, tuple(cells)))
    return found


def defined_in(root: Path, files: Iterable[str]) -> set[str]:
    """`path::name` of every test function in these files; what is absent has none."""
    return {
        f"{file}::{node.name}"
        for file in files
        if (root / file).exists()
        for node in ast.parse((root / file).read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def files_cited(table: list[Row]) -> set[str]:
    return {
        cited.partition("::")[0] for row in table for cited in CITED.findall(row.ours)
    }


def problems(table: list[Row], tests: set[str]) -> list[str]:
    """What is wrong with rows, given the tests that there are."""
    return [
        *(f"{name}: twice" for name, n in names(table).items() if n > 1),
        *(problem for row in table for problem in problems_of(row, tests)),
    ]


def names(table: list[Row]) -> Counter[str]:
    return Counter(row.name for row in table)


def problems_of(row: Row, tests: set[str]) -> list[str]:
    if len(row.cells) != len(HEADER) or not all(row.cells):
        return [f"{row.name}: not three cells with something in them"]
    cited, excuses = CITED.findall(row.ours), EXCUSE.findall(row.ours)
    found = [
        f"{row.name}: no such test {test}" for test in cited if test not in tests
    ] + [
        f"{row.name}: {kind} without a reason"
        for kind, reason in excuses
        if len(CITED.sub("", reason).split()) < LEAST_WORDS
    ]
    if row.ours.count("::") != len(cited):
        found.append(f"{row.name}: cites what is no `tests/path.py::test_name`")
    if not cited and not excuses:
        found.append(f"{row.name}: neither a test, nor N/A, nor not yet")
    return found


@pytest.fixture(scope="module")
def table() -> list[Row]:
    return rows((ROOT / "tests" / "UPSTREAM.md").read_text())


def test_every_row_cites_tests_that_exist_or_says_why_not(table):
    assert problems(table, defined_in(ROOT, files_cited(table))) == []


def uncovered(table: list[Row], pinned: Mapping[str, Sequence[str]]) -> list[str]:
    """What upstream tests and no row names, and what rows name that it has not."""
    named: dict[str, set[str]] = {heading(file): set() for file in pinned}
    found = []
    for row in table:
        if row.file in named:
            named[row.file] |= row.theirs
        elif row.file not in OTHERS:
            found.append(f"{row.file}: upstream has no such file of tests")
    for file, tests in pinned.items():
        names = named[heading(file)]
        missing = [test for test in tests if not is_named_by(test, names)]
        known = {part for test in tests for part in (test, *test.split("::"))}
        found += [f"{heading(file)}: no row names {test}" for test in missing]
        found += [
            f"{heading(file)}: upstream has no {name}" for name in sorted(names - known)
        ]
    return list(dict.fromkeys(found))


def test_every_test_of_upstream_has_a_row_and_every_row_is_of_one(table):
    pinned = {
        file: tests
        for project in read_pinned().values()
        for file, tests in project.tests.items()
    }
    assert uncovered(table, pinned) == []


def test_the_commits_are_those_that_are_pinned():
    text = (ROOT / "tests" / "UPSTREAM.md").read_text()
    for name, project in read_pinned().items():
        assert f"{name} `{project.commit[:9]}` ({project.date})" in text


def test_rows_are_counted_by_verdict(table):
    text = (ROOT / "tests" / "UPSTREAM.md").read_text()
    counted = text.partition("```\n")[2].partition("```")[0]
    counts = Counter(row.verdict for row in table)
    assert counted == "".join(f"{v}: {n}\n" for v, n in counts.most_common())


# The checker catches what it is for.


def planted(*ours: str) -> list[Row]:
    """Rows of one table, numbered, with these last cells."""
    lines = [f"| case {i} | something | {cell} |" for i, cell in enumerate(ours)]
    head = ["### `test_upstream.py`", "", f"| {' | '.join(HEADER)} |", "|---|---|---|"]
    return rows("\n".join([*head, *lines]))


GOOD = "`tests/test_a.py::test_good`"
NO_TORCH = "N/A: a reason of a few words"


@pytest.mark.parametrize(
    "ours, problem",
    [
        ("`tests/test_a.py::test_gone`", "no such test tests/test_a.py::test_gone"),
        (f"{GOOD}, `tests/b/test_b.py::test_good`", "no such test tests/b/test_b.py"),
        ("`tests/test_a.py::helper`", "no such test"),
        ("`tests/test_a.py::test_good[id]`", "cites what is no"),
        ("tests/test_a.py::test_good", "cites what is no"),  # without backticks
        ("", "not three cells"),
        ("N/A", "neither a test"),
        ("N/A:", "N/A without a reason"),
        ("N/A: no use", "N/A without a reason"),
        ("not yet: later", "not yet without a reason"),
        (f"{GOOD}; not yet:", "not yet without a reason"),
        (f"not yet: {GOOD} and {GOOD}", "not yet without a reason"),
        ("as above", "neither a test"),
        (f"{GOOD} | {GOOD}", "not three cells"),
    ],
)
def test_a_planted_fault_is_caught(ours, problem):
    found = problems(planted(GOOD, ours), {"tests/test_a.py::test_good"})
    assert any(problem in each for each in found), found
    assert all(each.startswith("test_upstream.py, case 1: ") for each in found)


def test_a_planted_second_row_of_one_name_is_caught():
    assert problems(planted(GOOD) * 2, {"tests/test_a.py::test_good"}) == [
        "test_upstream.py, case 0: twice"
    ]


@pytest.mark.parametrize(
    "ours",
    [
        GOOD,
        f"{GOOD} [one case], {GOOD} (and why)",
        NO_TORCH,
        f"not yet: a reason of a few words; for a part of it {GOOD}",
        f"{GOOD}; not yet: a reason of a few words",
    ],
)
def test_a_good_row_is_let_be(ours):
    assert problems(planted(ours), {"tests/test_a.py::test_good"}) == []


def test_tests_are_read_from_the_source(tmp_path):
    (tmp_path / "test_a.py").write_text(
        "import absent\ndef test_one():\n    def test_inner(): ...\n"
        "def helper(): ...\n# def test_comment(): ...\nclass test_class: ..."
    )
    found = defined_in(tmp_path, ["test_a.py", "test_absent.py"])
    assert found == {"test_a.py::test_one"}


def test_what_came_and_what_went_upstream_is_caught():
    cells = ["`test_a`", "`TestB`", "`test_gone` [case]", "what is left"]
    lines = [f"| {cell} | something | {NO_TORCH} |" for cell in cells]
    table = rows("\n".join(["### `mfsdp_v2/test_x.py`", *lines]))
    pinned = {
        "tests/unit_tests/distributed/mfsdp_v2/test_x.py": [
            *("test_a", "TestB::test_c", "TestB::test_d", "TestE::test_new"),
        ]
    }
    assert uncovered(table, pinned) == [
        "mfsdp_v2/test_x.py: no row names TestE::test_new",
        "mfsdp_v2/test_x.py: upstream has no test_gone",
    ]
    assert uncovered(table, {}) == [
        "mfsdp_v2/test_x.py: upstream has no such file of tests"
    ]


def test_upstreams_tests_are_read_from_the_source():
    source = (
        "import absent\nasync def test_one(): ...\ndef helper(): ...\n"
        "class TestTwo:\n    def test_in(self): ...\n    def setup(self): ...\n"
    )
    assert named_tests(source) == ["test_one", "TestTwo::test_in"]
    guard = "if __name__ == '__main__':\n    main()"
    assert named_tests(f"def main(): ...\n{guard}") == ["main"]
    assert named_tests(f"{source}{guard}") == ["test_one", "TestTwo::test_in"]
    assert named_tests("def main(): ...") == []
