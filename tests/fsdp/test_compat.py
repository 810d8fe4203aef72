"""Private parts of other packages are there, and one that is gone says the version."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import logging
import re
from pathlib import Path

import orbax.checkpoint as ocp
import pytest
from flax import nnx
from helpers.errors import facts

import fsdp_jax as fsdp
from bridge import _compat as bridge_compat
from fsdp_jax import _compat as compat
from fsdp_jax.checkpoint import _orbax_handler

pytestmark = pytest.mark.versions
ROOT = Path(__file__).parents[2]
NAMES = {
    f"{module.__name__}.{name}": value
    for module in (compat, bridge_compat)
    for name, value in vars(module).items()
    if isinstance(value, module.PrivateName)
}


@pytest.mark.parametrize("name", NAMES)
def test_the_installed_version_has_it(name):
    assert NAMES[name].get() is not None


@pytest.mark.parametrize("name", NAMES)
def test_one_that_is_gone_is_an_error_with_its_version(name, monkeypatch):
    private = NAMES[name]
    module = importlib.import_module(private.module)
    private.get()  # A package whose submodule it is has it once that is imported.
    monkeypatch.delattr(module, private.attribute)
    monkeypatch.setattr(importlib, "import_module", lambda name: module)
    package = getattr(private, "package", "jax")
    version = importlib.metadata.version(package)
    gone = f"{private.module}.{private.attribute}"
    with pytest.raises(ImportError, match=facts(package, version, gone)):
        private.get()


def test_what_is_replaced_is_used_and_what_was_there_is_returned(monkeypatch):
    private = compat.TYRO_OPTIONS
    before = private.get()
    assert private.replace({"ansi_codes": False}) is before
    assert private.get() == {"ansi_codes": False}
    private.replace(before)


def test_orbax_removes_steps_in_the_method_that_is_replaced(monkeypatch, tmp_path):
    assert compat.ORBAX_FINALIZE in vars(_orbax_handler._Manager)
    monkeypatch.delattr(ocp.CheckpointManager, compat.ORBAX_FINALIZE)
    with pytest.raises(
        RuntimeError, match=facts(f"orbax-checkpoint {ocp.__version__}")
    ):
        fsdp.Checkpointer(tmp_path / "run")


def test_jax_has_the_logger_and_flax_the_attributes():
    assert compat.XLA_BRIDGE_LOGGER in logging.root.manager.loggerDict
    module = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    own = [n for n in vars(module) if n.startswith(compat.NNX_STATE_PREFIX)]
    assert own and {"kernel", "bias"} <= vars(module).keys() - own


def private_imports(text: str) -> list[str]:
    """Modules and names of other packages with one leading underscore."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found += [node.value] if node.value.startswith("jax._") else []
    return [
        name
        for name in found
        if not name.startswith(("fsdp_jax", "bridge", "__future__"))
        and any(re.match(r"_(?!_)", part) for part in name.split("."))
    ]


def test_nothing_else_reaches_into_another_package():
    for package in ("fsdp_jax", "bridge"):
        for file in (ROOT / package).rglob("*.py"):
            if file.name != "_compat.py":
                assert private_imports(file.read_text()) == [], file


def test_a_planted_reach_is_noticed():
    text = "from jax._src import core\nimport flax._x\nfrom a import _b, c\nimport jax"
    assert private_imports(text) == ["jax._src.core", "flax._x", "a._b"]
