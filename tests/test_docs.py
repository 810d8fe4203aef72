"""The README and the documentation are true: their code runs, their commands exist."""

from __future__ import annotations

import ast
import inspect
import json
import operator
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.markdown import (
    ROOT,
    Block,
    all_blocks,
    anchors,
    blocks,
    commands,
    links,
    pages,
)
from tiny_configs import hf_fields

import bridge
import fsdp_jax as fsdp
from fsdp_jax.cli import main

pytestmark = pytest.mark.torch  # The small Llama is written by transformers.

README = (ROOT / "README.md").read_text()
# A page stands for the commands it shows; what is long there is short here.
SHORT = {
    "--steps 100": "--steps 2 --seq 16",
    "--steps 200": "--steps 3",
    "--profile-from 10 --profile-steps 3": "--profile-from 2 --profile-steps 1",
}
# Of these it is enough here that they parse: each is run by the tests of its own.
TESTED_ELSEWHERE = {"plan": "tests/cli/test_cli_plan.py"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Iterator[Path]:
    """The current directory while the blocks and commands run."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "FILE").write_bytes(Path(__file__).read_bytes())
    before = Path.cwd()
    os.chdir(folder)
    assert (
        main(["make-tiny-llama", "tiny-llama", "--layers", "2", "--hidden", "32"]) == 0
    )
    mixtral = folder / "tiny-mixtral"  # of which the page reads the config alone
    mixtral.mkdir()
    (mixtral / "config.json").write_text(json.dumps(hf_fields("mixtral")))
    yield folder
    os.chdir(before)


@pytest.fixture(scope="module")
def readme(folder) -> dict[str, Any]:
    """The names that the README's blocks leave behind."""
    names: dict[str, Any] = {}
    for block in blocks("README.md", README):
        if block.language == "python":
            run(block, names)
    return names


def run(block: Block, names: dict[str, Any]) -> None:
    exec(compile(block.text, block.page, "exec"), names)


def test_the_python_blocks_of_the_readme_run_in_order(readme, folder):
    assert float(readme["metrics"]["loss"]) > 0
    assert (folder / "exported" / "model.safetensors").exists()


@pytest.mark.parametrize(
    "page", sorted({b.page for b in all_blocks("python")} - {"README.md"})
)
def test_the_python_blocks_of_a_page_run_in_order(readme, page):
    names = dict(readme)
    # Steps of pages donate their states, so each page has one of its own.
    names["state"] = fsdp.init(
        names["plan"],
        names["tx"],
        fsdp.init_params(names["plan"], names["jax"].random.key(0)),
    )
    names["step"] = fsdp.make_train_step(names["plan"], names["loss_fn"], names["tx"])
    for block in blocks(page, pages()[page]):
        if block.language == "python" and not block.parsed:
            run(block, names)


def test_blocks_that_are_not_run_name_only_what_is_there():
    parsed = [block for block in all_blocks("python") if block.parsed]
    assert parsed
    for block in parsed:
        for node in ast.walk(ast.parse(block.text)):
            match node:
                case ast.Call(func=ast.Attribute(ast.Name("fsdp"), name)):
                    function = inspect.signature(getattr(fsdp, name))
                    given = {word.arg: None for word in node.keywords if word.arg}
                    function.bind_partial(*node.args, **given)
                case ast.Attribute(ast.Name("forecast"), name):
                    fields = fsdp.Forecast.__dataclass_fields__
                    assert name in fields or hasattr(fsdp.Forecast, name), name


def test_the_commands_run_in_order(folder, capsys):
    (folder / "DIR").symlink_to(folder / "tiny-llama")
    seen = set()
    for page, command in commands():
        name, *arguments = shlex.split(command)
        if name != "fsdp-jax" or command in seen:
            continue
        seen.add(command)
        for written, short in SHORT.items():
            command = command.replace(written, short)
        _, *arguments = shlex.split(command)
        if arguments[0] in {*TESTED_ELSEWHERE, "launch"} or "--help" in arguments:
            assert parses(arguments), f"{page}: {command}"
        else:
            said = f"{page}: {command}"
            assert main(arguments) == 0, f"{said}\n{capsys.readouterr().err}"
    assert len(seen) > 20


def parses(arguments: list[str]) -> bool:
    """Whether a command takes its arguments; help is asked for after them."""
    before = arguments[: arguments.index("--")] if "--" in arguments else arguments
    with pytest.raises(SystemExit) as stop:
        main([*before, "--help"])
    return stop.value.code == 0


def test_every_other_command_is_one_that_exists():
    for page, command in commands():
        words = shlex.split(command)
        while re.fullmatch(r"[A-Z]+=\S+", words[0]):
            del words[0]
        checked = {
            "fsdp-jax": lambda words: True,  # run above
            "make": make_target_exists,
            "pip": extra_exists,
            "python": script_takes,
            "srun": begins_with_our_command,
            "torchrun": begins_with_our_command,
            "pre-commit": lambda words: (ROOT / ".pre-commit-config.yaml").exists(),
            ".venv/bin/pytest": lambda words: (ROOT / words[1]).exists(),
        }
        assert words[0] in checked, f"{page}: who checks {command}?"
        assert checked[words[0]](words), f"{page}: {command}"


def make_target_exists(words: list[str]) -> bool:
    makefile = (ROOT / "Makefile").read_text()
    return bool(re.search(rf"^{words[1]}:", makefile, flags=re.MULTILINE))


def extra_exists(words: list[str]) -> bool:
    pyproject = (ROOT / "pyproject.toml").read_text()
    extra = re.search(r"\[(\w+)\]", words[-1])
    return words[-1] == "." or bool(
        extra and re.search(rf"^{extra[1]} = ", pyproject, flags=re.MULTILINE)
    )


def script_takes(words: list[str]) -> bool:
    """A benchmark that is there, and has the options that are shown."""
    source = (ROOT / words[1]).read_text()
    options = [word for word in words[2:] if word.startswith("--")]
    return all(f'add_argument("{option}"' in source for option in options)


def begins_with_our_command(words: list[str]) -> bool:
    """A launcher of someone else's, and behind it a command that parses."""
    if "fsdp_jax.cli" in words:
        return parses(words[words.index("fsdp_jax.cli") + 1 :])
    return parses(words[words.index("fsdp-jax") + 1 :])


def test_the_blocks_are_of_languages_that_are_checked():
    every = [block for page, text in pages().items() for block in blocks(page, text)]
    assert {block.language for block in every} <= {"python", "sh", "text"}


def test_every_word_of_ours_is_one():
    for page, text in pages().items():
        for code in re.findall(r"`([^`\n]+)`", text):
            for name in re.findall(r"(?<![\w.])fsdp\.([\w.]+)", code):
                assert operator.attrgetter(name.rstrip("."))(fsdp), f"{page}: {code}"
            for name in re.findall(r"(?<![\w./])bridge\.([a-zA-Z][\w.]+)", code):
                assert operator.attrgetter(name.rstrip("."))(bridge), f"{page}: {code}"


def test_every_word_of_the_glossary_is_one():
    options = {
        *inspect.signature(fsdp.FSDPConfig).parameters,
        *inspect.signature(fsdp.MixedPrecisionPolicy).parameters,
        *inspect.signature(fsdp.make_train_step).parameters,
        *inspect.signature(fsdp.make_mesh).parameters,
        *inspect.signature(fsdp.fully_shard).parameters,
        *inspect.signature(fsdp.scan).parameters,
    }
    words = pages()["docs/pages/glossary.md"].partition("## Our own words")[0]
    rows = [line.split("|") for line in words.splitlines() if line.startswith("| ")]
    assert len(rows) >= 40
    for row in rows[1:]:
        for code in re.findall(r"`([\w=]+)`", row[2]):
            name = code.partition("=")[0]
            known = name in options or hasattr(fsdp, name)
            assert known or name in MODEL_WORDS, row


# Words of the glossary that are no option of ours.
MODEL_WORDS = {"output_dtype", "cast_forward_inputs"}


def test_files_and_links_exist():
    for page, text in pages().items():
        folder = (ROOT / page).parent
        for file in re.findall(r"`((?:notebooks|tests|benchmarks)/[\w./]*)`", text):
            assert (ROOT / file).exists(), f"{page}: {file}"
        for link in links(text):
            path, _, anchor = link.partition("#")
            target = folder / path if path else ROOT / page
            assert target.exists(), f"{page}: {link}"
            assert not anchor or anchor in anchors(target.read_text()), (
                f"{page}: {link}"
            )


def test_the_readme_is_read_in_ten_minutes():
    assert len(README.splitlines()) <= 205


def test_the_picture_shows_todays_numbers():
    script = ROOT / "docs" / "picture.py"
    subprocess.run(
        [sys.executable, script, "--check"],
        check=True,
        capture_output=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


def test_the_site_lists_every_page():
    text = (ROOT / "docs" / "mkdocs.yml").read_text()
    listed = re.findall(r"([\w/-]+\.md)\s*$", text, flags=re.MULTILINE)
    assert yaml.safe_load(text)["strict"]
    there = {page.removeprefix("docs/pages/") for page in pages() if "pages" in page}
    assert set(listed) - {"contributing.md", "changelog.md"} == there
