"""No `assert` of bridge guards what a file says: `python -O` drops them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

BRIDGE = Path(__file__).parents[2] / "bridge"


def asserts_of_values(text: str) -> list[int]:
    """Lines of the asserts that say more than of which type a value is."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Assert) and not _narrows(node.test)
    ]


def _narrows(test: ast.expr) -> bool:
    """Whether a type checker needs the test: `x is not None`, `isinstance(x, T)`."""
    match test:
        case ast.BoolOp(op=ast.And(), values=values):
            return all(map(_narrows, values))
        case ast.Compare(ops=[ast.IsNot()], comparators=[ast.Constant(value=None)]):
            return True
        case ast.Call(func=ast.Name(id="isinstance")):
            return True
    return False


def test_asserts_of_bridge_do_no_more_than_narrow_a_type():
    found = {
        str(path.relative_to(BRIDGE)): lines
        for path in BRIDGE.rglob("*.py")
        if (lines := asserts_of_values(path.read_text()))
    }
    assert found == {}


@pytest.mark.parametrize(
    "text, caught",
    [
        ("assert x is not None and y is not None", []),
        ("assert isinstance(x, int)", []),
        ("assert 'layers is missing' in wrong", [1]),
        ("def f(n):\n    assert n > 0 and n is not None", [2]),
        ("assert not isinstance(x, int)", [1]),
    ],
)
def test_a_planted_assert_of_a_value_is_caught(text, caught):
    assert asserts_of_values(text) == caught
