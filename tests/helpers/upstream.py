"""The tests of Megatron-LM and verl, as `tests/upstream.json` pins them."""

from __future__ import annotations

import ast
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PINNED = Path(__file__).parents[1] / "upstream.json"

PROGRAM = "main"
"""What stands for the test of a file that is a program and has no test function."""


@dataclasses.dataclass(frozen=True)
class Pinned:
    """The tests of one project at one commit.

    Attributes:
      commit: The commit, 40 digits.
      date: Its date.
      tests: File -> its tests, `test_x` or `TestClass::test_x`.
    """

    commit: str
    date: str
    tests: Mapping[str, Sequence[str]]

    def ids(self) -> list[str]:
        """Every test as `file::test`."""
        return [f"{file}::{t}" for file, tests in self.tests.items() for t in tests]

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def read_pinned(path: Path = PINNED) -> dict[str, Pinned]:
    """The pinned tests by project."""
    return {
        name: Pinned(**found) for name, found in json.loads(path.read_text()).items()
    }


def named_tests(source: str) -> list[str]:
    """The test functions of a file in their order; `main` of a program without any."""
    tree = ast.parse(source)
    found = []
    for node in tree.body:
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        found += [f"{prefix}{member.name}" for member in members if _is_test(member)]
    if not found and any(_is_main_guard(node) for node in tree.body):
        return [PROGRAM]
    return found


def _is_test(node: ast.stmt) -> bool:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return isinstance(node, kinds) and node.name.startswith("test")


def _is_main_guard(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)


def heading(file: str) -> str:
    """How UPSTREAM.md calls a file."""
    for folder in ("tests/unit_tests/distributed/", "tests/unit_tests/", "tests/"):
        if file.startswith(folder):
            return file.removeprefix(folder)
    return file


def is_named_by(test: str, names: set[str]) -> bool:
    """Whether a test is among names: by its own, its class, or both."""
    return bool(names & {test, *test.split("::")})
