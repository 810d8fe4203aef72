"""Tests match the names and numbers of an error, which outlive its sentence."""

import ast
import re
from pathlib import Path

import pytest
from helpers.errors import facts, is_prose

MESSAGE = (
    "Cannot make a mesh of dp_shard=3: the product 3.5 is not the number of devices, "
    "12.\n  'params.weight' (8, -1), pass devices=jax.devices()[:n]"
)


def matches_without_facts(source: str) -> list[int]:
    """Lines of `match=` in a test whose value is no call of `facts`."""
    return [
        keyword.value.lineno
        for call in ast.walk(ast.parse(source))
        if isinstance(call, ast.Call)
        for keyword in call.keywords
        if keyword.arg == "match" and not _is_facts(keyword.value)
    ]


def _is_facts(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and ast.unparse(value.func) == "facts"


def test_every_match_is_of_facts():
    folder = Path(__file__).parent
    found = [
        f"{path.relative_to(folder)}:{line}"
        for path in sorted(folder.rglob("*.py"))
        for line in matches_without_facts(path.read_text())
    ]
    assert not found, f"write match=facts(...) of tests/helpers/errors.py: {found}"


@pytest.mark.parametrize(
    "value", ['"a sentence"', "says", 'r"x.*y"', 're.escape("x")', 'facts("x") + says']
)
def test_a_planted_match_of_prose_is_found(value):
    planted = (
        f"def test():\n    with pytest.raises(ValueError, match={value}):\n        f()"
    )
    assert matches_without_facts(planted) == [2]


@pytest.mark.parametrize(
    "wanted",
    [
        ["dp_shard=3"],
        ["3", 12, "3.5"],
        ["12", "dp_shard"],
        ["'params.weight'", "(8, -1)"],
        ["params.weight", "-1"],
        ["devices=jax.devices()[:n]", "mesh"],
    ],
    ids=str,
)
def test_facts_are_found_in_any_order_and_over_lines(wanted):
    assert re.search(facts(*wanted), MESSAGE)


@pytest.mark.parametrize(
    "missing", ["2", "1", "5", "35", "dp_shard=35", "shard", "params.weigh", "mes"]
)
def test_a_fact_is_no_part_of_a_longer_name_or_number(missing):
    assert not re.search(facts("12", missing), MESSAGE)


@pytest.mark.parametrize(
    "prose",
    ["at least", "is not", "the product 3", "Cannot make", "No step 7", "a\nline", " "],
)
def test_prose_is_no_fact(prose):
    with pytest.raises(ValueError, match=facts(repr([prose]))):
        facts("12", prose)


@pytest.mark.parametrize(
    "fact",
    [
        "'asks for this'",
        "`git lfs pull`",
        "stage 0",
        "dtype = 'fp4'",
        "shape None",
        "--ckpt-format torch_dist",
        "TP 1 x PP 2",
        "float16, float32",
    ],
)
def test_names_with_values_and_quotes_are_facts(fact):
    assert not is_prose(fact)


def test_no_fact_at_all_is_refused():
    with pytest.raises(ValueError, match=facts("0")):
        facts()
