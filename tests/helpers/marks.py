"""Which test modules need torch, and which say so, read from their source."""

import ast
from collections.abc import Mapping
from pathlib import Path

TORCH = {"torch", "transformers"}


def has_module_mark(source: str, mark: str) -> bool:
    """Whether a test module's `pytestmark` holds `pytest.mark.<mark>`."""
    return any(
        isinstance(node, ast.Attribute) and ast.unparse(node) == f"pytest.mark.{mark}"
        for statement in ast.parse(source).body
        if isinstance(statement, ast.Assign)
        and ast.unparse(statement.targets[0]) == "pytestmark"
        for node in ast.walk(statement.value)
    )


def unmarked(tests: Mapping[str, str]) -> list[str]:
    """Files that cannot be imported without torch, and do not say so.

    Args:
      tests: Path below `tests/`, with slashes, to the file's text.
    """
    needing = needing_torch(tests)
    marked = {file for file in needing if has_module_mark(tests[file], "torch")}
    # No mark keeps a conftest.py from being read.
    return sorted(
        file
        for file in needing
        if Path(file).name == "conftest.py"
        or Path(file).name.startswith("test_")
        and file not in marked
    )


def needing_torch(tests: Mapping[str, str]) -> set[str]:
    """Files that load torch when they are imported, themselves or by a helper."""
    loads = {file: loaded_with(text) for file, text in tests.items()}
    needing: set[str] = set()
    for _ in tests:  # as often as the longest chain of helpers could need
        torchy = TORCH | {import_name(file) for file in needing} - {"conftest"}
        needing = {file for file, names in loads.items() if names & torchy}
    return needing


def import_name(file: str) -> str:
    """How tests import it: from `tests/`, or from `tests/bridge/`."""
    return file.removesuffix(".py").removeprefix("bridge/").replace("/", ".")


def loaded_with(text: str) -> set[str]:
    """Every name that the imports outside functions could load, and its first part."""
    names = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module}
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    # safetensors.torch and the like load torch too.
    torch = {"torch" for name in names if "torch" in name.split(".")}
    return names | {name.partition(".")[0] for name in names} | torch
