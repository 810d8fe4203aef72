"""The public names: which they are, what their docstrings say, that their examples run.

What examples share is the first block of `docs/pages/reference/fsdp_jax.md`.
"""

from __future__ import annotations

import ast
import dataclasses
import doctest
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
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

SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Examples|Source):", re.M)
ENTRY = re.compile(r"^  \*{0,2}(\w+): \S", re.M)


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


def sections(doc: str) -> dict[str, str]:
    """The text of each section of a docstring, and its first line under ""."""
    heads = list(SECTION.finditer(doc))
    ends = [*(head.start() for head in heads[1:]), len(doc)]
    texts = {
        head[1]: doc[head.end() : end] for head, end in zip(heads, ends, strict=True)
    }
    return {"": doc.partition("\n")[0], **texts}


def missing(value: Any) -> Iterator[str]:
    """What the docstring of a function or a class lacks."""
    doc = sections(inspect.getdoc(value) or "")
    if not re.fullmatch(r"[A-Z`].*\.", doc[""]):
        yield "a first line that is a sentence"
    if not doc.get("Examples", "").lstrip().startswith(">>> "):
        yield "Examples"
    if not inspect.isclass(value):
        yield from missing_of_a_function(value)
    elif dataclasses.is_dataclass(value):
        yield from missing_of_a_dataclass(value)
    else:
        for name, method in inspect.getmembers(value, inspect.isfunction):
            if name == "__init__" or name[0] != "_":
                for what in missing_of_a_function(method):
                    yield f"{what} of {name}"


def missing_of_a_function(function: Callable[..., Any]) -> Iterator[str]:
    doc = sections(inspect.getdoc(function) or "")
    signature = inspect.signature(function)
    names = [name for name in signature.parameters if name != "self"]
    if (said := ENTRY.findall(doc.get("Args", ""))) != names:
        yield f"Args for {names}, it has {said}"
    if signature.return_annotation not in ("None", inspect.Signature.empty):
        if "Returns" not in doc:
            yield "Returns"
    if raises(function) and "Raises" not in doc:
        yield "Raises"


def missing_of_a_dataclass(cls: type) -> Iterator[str]:
    doc = sections(inspect.getdoc(cls) or "")
    names = [field.name for field in dataclasses.fields(cls)]
    said = ENTRY.findall(doc.get("Args", "") + doc.get("Attributes", ""))
    if said != names:
        yield f"Args or Attributes for {names}, it has {said}"
    check = vars(cls).get("__post_init__")
    if check and raises(check) and "Raises" not in doc:
        yield "Raises"


def raises(function: Callable[..., Any]) -> bool:
    """Whether the function itself has a `raise` statement."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return any(isinstance(node, ast.Raise) for node in ast.walk(tree))


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


def failures(doc: str, names: dict[str, Any]) -> str:
    """Runs the examples of a docstring; returns doctest's report of those that fail."""
    test = doctest.DocTestParser().get_doctest(doc, names, "example", None, 0)
    assert test.examples
    said: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    return "".join(said)


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
