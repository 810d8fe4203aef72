"""Docstrings of the public names of bridge are complete, and their examples run.

What examples share is the first block of `docs/pages/reference/bridge.md`.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.docstrings import failures, missing
from helpers.markdown import ROOT, blocks

import bridge

PAGE = "docs/pages/reference/bridge.md"
# A protocol, which nobody calls: its methods have no arguments to tell apart.
PROTOCOLS = {"Source"}
NEEDS_TORCH = {"to_torch"}
# What the pages name first of its packages.
FURTHER = (
    *("adapt.conv", "adapt.linear", "megatron.from_args", "megatron.open_megatron"),
    *("models.DecoderConfig", "models.generate", "models.tensor_parallel_rules"),
)


def names() -> list[str]:
    return sorted(
        name
        for name, value in vars(bridge).items()
        if not (name.startswith("_") or inspect.ismodule(value) or name in PROTOCOLS)
    )


@pytest.mark.parametrize("name", names())
def test_the_docstring_of_a_public_name_of_bridge_is_complete(name):
    assert list(missing(getattr(bridge, name))) == []


@pytest.fixture(scope="module")
def namespace(tmp_path_factory) -> Iterator[dict[str, Any]]:
    """What the first block of the page leaves behind, in the current directory."""
    made: dict[str, Any] = {}
    first = blocks(PAGE, (ROOT / PAGE).read_text())[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("examples"))
        exec(compile(first.text, PAGE, "exec"), made)
        yield made


def _case(name: str) -> Any:
    return pytest.param(name, marks=[pytest.mark.torch] * (name in NEEDS_TORCH))


@pytest.mark.parametrize("name", [_case(name) for name in (*names(), *FURTHER)])
def test_the_example_of_a_public_name_of_bridge_runs(name, namespace, tmp_path):
    doc = inspect.getdoc(operator.attrgetter(name)(bridge)) or ""
    assert failures(doc, namespace | {"path": str(tmp_path)}) == ""
