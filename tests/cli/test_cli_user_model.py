"""`fsdp-jax plan --model`: a model, a loss and a batch of the user's own."""

from __future__ import annotations

import json
import re
import sys

import jax
import jax.numpy as jnp
import pytest
from helpers.errors import facts

import fsdp_jax as fsdp
from fsdp_jax.cli import main
from fsdp_jax.cli._user_model import open_user_model

MODULE = """
import jax, jax.numpy as jnp
import numpy as np
from flax import nnx


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(64, 64, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.linear(x))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])


def make_model(key):
    return Model(nnx.Rngs(key))


def loss(model, batch):
    x = batch["x"]
    for block in model.blocks:
        x = block(x)
    return jnp.mean((x - batch["y"]) ** 2)


def loss_alone(this):
    return 0.0


def batch_of(this):
    return this


def make_batch():
    return {"x": np.zeros((16, 64), np.float32), "y": jnp.ones((16, 64))}


NUMBER = 3
"""
MODEL = ("--model", "their_train:make_model", "--loss", "their_train:loss")
ARRAYS = "x=float32[16,64],y=float32[16,64]"


@pytest.fixture(autouse=True)
def in_their_folder(tmp_path, monkeypatch):
    """The current directory has the module, which no path names."""
    (tmp_path / "their_train.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    sys.modules.pop("their_train", None)


def plan(*options: str) -> int:
    return main(["plan", *MODEL, *options])


@pytest.mark.plan
def test_a_model_of_ones_own_is_planned_and_its_strategies_compared(capsys, tmp_path):
    file = tmp_path / "plan.json"
    units = ("--unit", "blocks.1", "--unit", "their_train:Block")
    batch = ("--batch", "their_train:make_batch")
    assert not plan(*units, *batch, "--sweep", "--json", str(file))
    out = capsys.readouterr().out
    assert "recommended: " in out
    names = {line.split("  ")[0].strip(" |") for line in out.splitlines()}
    assert {"FSDP (ZeRO-3)", "ZeRO-2", "ZeRO-1"} <= names
    found = json.loads(file.read_text())
    assert any(row["unit"].startswith("blocks") for row in found["collectives"])
    assert found["tokens"] is None


def test_a_batch_is_read_from_a_description_or_traced_from_a_function():
    def batch(text):
        return open_user_model(MODEL[1], MODEL[3], text, ()).batch

    wanted = {name: jax.ShapeDtypeStruct((16, 64), jnp.float32) for name in "xy"}
    assert batch(ARRAYS) == batch("their_train:make_batch") == wanted
    assert batch("int32[4, 3]") == jax.ShapeDtypeStruct((4, 3), jnp.int32)


def test_units_are_classes_methods_patterns_and_stacks_of_them():
    units = ("their_train:Block", "their_train:Block.__call__", "blocks.*")
    stacked = ("stacked:their_train:Block", "stacked:blocks")
    model = open_user_model(MODEL[1], MODEL[3], ARRAYS, units + stacked)
    block = sys.modules["their_train"].Block
    assert model.units[:3] == (block, block.__call__, "blocks.*")
    assert model.units[3:] == (fsdp.Stacked(block), fsdp.Stacked("blocks"))


@pytest.mark.parametrize(
    "options, words",
    [
        (("--batch", "8"), ("--batch", "8")),
        (("--batch", "x=float99[8]"), ("float99",)),
        (("--batch", "x=int32[8],int32[8]"), ("--batch",)),
        (("--batch", "int32[8] and more"), ("--batch", "more")),
        (("--batch", "their_train:none"), ("none", "make_batch")),
        (("--batch", "their_train:NUMBER"), ("--batch", "their_train:NUMBER", "1")),
        (("--batch", ARRAYS, "--loss", "their_train:NUMBER"), ("--loss", "NUMBER")),
        (("--batch", ARRAYS, "--loss", "no_such:loss"), ("--loss", "no_such")),
        (("--batch", ARRAYS, "--seq", "8"), ("--seq", "--model")),
        (("--batch", ARRAYS, "--hf", "model"), ("--hf", "--model")),
        ((), ("--batch",)),
    ],
)
def test_what_is_no_model_loss_or_batch_is_refused(options, words, capsys):
    assert plan(*options) == 2
    error = capsys.readouterr().err
    assert re.search(facts(*words), error), error


def test_a_loss_that_does_not_take_the_batch_says_where(capsys):
    assert plan("--batch", "x=float32[16,32],y=float32[16,32]") == 2
    error = capsys.readouterr().err
    line = 1 + MODULE.splitlines().index("        return jnp.tanh(self.linear(x))")
    assert re.search(facts("--loss their_train:loss", f"their_train.py:{line}"), error)
    assert "Traceback" not in error
    named = ("--batch", "their_train:batch_of")
    assert plan(*named) == 2
    error = capsys.readouterr().err
    line = 1 + MODULE.splitlines().index("def batch_of(this):")
    assert re.search(facts(*named, "TypeError", f"their_train.py:{line}"), error)
    alone = ("--loss", "their_train:loss_alone")
    assert plan("--batch", "x=float32[16,64]", *alone) == 2
    assert re.search(facts("loss_fn", "(this)"), capsys.readouterr().err)
    assert plan("--batch", "z=float32[16,64]") == 2
    assert re.search(
        facts("KeyError", "'x'", "their_train:loss"), capsys.readouterr().err
    )


def test_options_of_ones_own_model_are_refused_without_it(capsys, tmp_path):
    assert main(["plan", "--config", str(tmp_path), "--unit", "a"]) == 2
    assert "--unit" in capsys.readouterr().err
