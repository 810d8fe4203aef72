"""The public names: which they are, what their docstrings say, that their examples run.

What examples share is the first block of `docs/pages/reference/fsdp_jax.md`.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from helpers.docstrings import failures, missing
from helpers.markdown import ROOT, blocks

import fsdp_jax as fsdp

PAGE = "docs/pages/reference/fsdp_jax.md"
NAMES = (
    *("FSDPConfig", "LoRAConfig", "MixedPrecisionPolicy", "OffloadPolicy", "Padded"),
    *("ParamPlan", "PipelineConfig", "Placements", "Plan", "Stacked", "TrainState"),
    *("Checkpointer", "HostBatches", "abstract_state", "audit_step", "estimate_step"),
    *("fully_shard", "global_batch", "host_shard", "init_params", "init_state"),
    *("initialize", "latest_step", "load", "make_eval_step", "make_forward"),
    *("make_mesh", "make_train_step", "reshard", "save", "scan", "trainable", "unit"),
    *("unshard", "value_and_grad"),
)
MODULES = (
    *("audit", "checkpoint", "data", "launch", "lora", "notebook", "ops", "optim"),
    *("planner", "replay", "resharding", "rl", "sharding", "step", "training"),
)
COMPILES_FOR_GPUS = {"estimate_step"}


def exported() -> list[str]:
    """The names of `import X as X` in the package, modules included."""
    tree = ast.parse(Path(str(fsdp.__file__)).read_text())
    return [
        alias.asname
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname and not alias.asname.startswith("_")
    ]


def test_the_public_names_are_these():
    assert sorted(exported()) == sorted([*NAMES, *MODULES])
    assert set(MODULES) == {name for name in exported() if inspect.ismodule(of(name))}


def of(name: str) -> Any:
    return getattr(fsdp, name)


# Docstrings


@pytest.mark.parametrize("name", NAMES)
def test_the_docstring_of_a_public_name_is_complete(name):
    assert list(missing(of(name))) == []


def test_a_planted_docstring_that_is_not_complete_is_caught():
    def planted(size: int, dtype: str = "") -> int:
        """Says

        Args:
          size: Number of elements.
        """
        raise ValueError(size, dtype)

    @dataclasses.dataclass
    class Planted:
        """A class.

        Attributes:
          size: Number of elements.

        Examples:
          >>> 1
          1
        """

        size: int
        dtype: str

    assert list(missing(planted)) == [
        "a first line that is a sentence",
        "Examples",
        "Args for ['size', 'dtype'], it has ['size']",
        "Returns",
        "Raises",
    ]
    assert list(missing(Planted)) == [
        "Args or Attributes for ['size', 'dtype'], it has ['size']"
    ]


# Examples


@pytest.fixture(scope="module")
def namespace() -> dict[str, Any]:
    """What the first block of the page leaves behind."""
    names: dict[str, Any] = {}
    first = blocks(PAGE, (ROOT / PAGE).read_text())[0]
    exec(compile(first.text, PAGE, "exec"), names)
    return names


def _case(name: str) -> Any:
    return pytest.param(name, marks=[pytest.mark.plan] * (name in COMPILES_FOR_GPUS))


@pytest.mark.parametrize("name", [_case(name) for name in NAMES])
def test_the_example_of_a_public_name_runs(name, namespace, tmp_path):
    # Copied, since training steps donate the state that was made of them.
    params = jax.tree.map(jnp.copy, namespace["params"])
    names = namespace | {"params": params, "path": str(tmp_path)}
    assert failures(inspect.getdoc(of(name)) or "", names) == ""


@pytest.mark.parametrize("doc", [">>> 1 + 1\n3", ">>> none"])
def test_a_planted_example_that_is_wrong_is_caught(doc):
    assert "Failed example" in failures(doc, {})
