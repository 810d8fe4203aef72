"""The README is true: its code runs and its commands exist."""

from __future__ import annotations

import inspect
import operator
import re
from pathlib import Path
from typing import Any

import pytest

import fsdp_jax as fsdp
from fsdp_jax.cli import main

pytestmark = pytest.mark.torch  # The small Llama is written by transformers.

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def commands(start: str) -> list[str]:
    lines = "\n".join(blocks("sh")).splitlines()
    found = [line.split("#")[0].strip() for line in lines if line.startswith(start)]
    assert found
    return found


def test_the_python_blocks_run_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["make-tiny-llama", "tiny-llama"]) == 0
    names: dict[str, Any] = {}
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), names)
    assert float(names["metrics"]["loss"]) > 0
    assert (tmp_path / "exported" / "model.safetensors").exists()


def test_the_commands_run_in_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").write_bytes(Path(__file__).read_bytes() * 3)
    assert main(["make-tiny-llama", "DIR", "--layers", "2", "--hidden", "32"]) == 0
    steps = {
        "--steps 100": "--steps 2 --seq 32",
        "--steps 200": "--steps 3",
        "--profile-from 10 --profile-steps 3": "--profile-from 2 --profile-steps 1",
    }
    for command in commands("fsdp-jax"):
        for written, short in steps.items():
            command = command.replace(written, short)
        arguments = command.split()[1:]
        if "--help" in arguments:
            with pytest.raises(SystemExit) as stop:
                main(arguments)
            assert stop.value.code == 0
        else:
            assert main(arguments) == 0, capsys.readouterr().err


def test_the_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for command in commands("make"):
        assert re.search(rf"^{command.split()[1]}:", makefile, flags=re.MULTILINE)


def test_the_extras_exist():
    pyproject = (ROOT / "pyproject.toml").read_text()
    for command in commands("pip"):
        extra = re.search(r"\[(\w+)\]", command)
        assert extra and re.search(rf"^{extra[1]} = ", pyproject, flags=re.MULTILINE)


def test_every_word_of_ours_in_the_tables_is_one():
    options = {
        *inspect.signature(fsdp.FSDPConfig).parameters,
        *inspect.signature(fsdp.MixedPrecisionPolicy).parameters,
        *inspect.signature(fsdp.make_train_step).parameters,
        *inspect.signature(fsdp.make_mesh).parameters,
        *inspect.signature(fsdp.fully_shard).parameters,
        *inspect.signature(fsdp.scan).parameters,
    }
    for code in re.findall(r"`([^`\n]+)`", README):
        for name in re.findall(r"\bfsdp\.([\w.]+)", code):
            assert operator.attrgetter(name)(fsdp), code
    ours = README.partition("## Coming from PyTorch")[2].partition("\n## ")[0]
    rows = [line.split("|") for line in ours.splitlines() if line.startswith("| ")]
    assert len(rows) >= 40
    for row in rows[1:]:
        for code in re.findall(r"`([\w=]+)`", row[2]):
            name = code.partition("=")[0]
            known = name in options or hasattr(fsdp, name)
            assert known or name in MODEL_WORDS, row


# Words of the tables that are no option of ours.
MODEL_WORDS = {"output_dtype", "cast_forward_inputs"}


def test_files_and_links_exist():
    files = re.findall(r"`((?:notebooks|tests)/[\w./]*)`", README)
    assert files and all((ROOT / file).exists() for file in files)
    anchors = {
        re.sub(r"[^\w-]", "", title.lower().replace(" ", "-"))
        for title in re.findall(r"^#+ (.*)$", README, flags=re.MULTILINE)
    }
    assert set(re.findall(r"\]\(#([\w-]+)\)", README)) <= anchors
