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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import social_card
import tyro
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
from fsdp_jax import cli
from fsdp_jax.cli import main

pytestmark = pytest.mark.torch  # The small Llama is written by transformers.

README = (ROOT / "README.md").read_text()
# A page stands for the commands it shows; what is long there is short here.
SHORT = {
    "--steps 100": "--steps 2 --seq 16",
    "--steps 200": "--steps 3",
    "--steps 300": "--steps 2 --seq 64",
    "--profile-from 10 --profile-steps 3": "--profile-from 2 --profile-steps 1",
}
# Of these it is enough here that they parse: each is run by the tests of its own.
TESTED_ELSEWHERE = {
    "audit": "tests/cli/test_cli_audit.py",
    "plan": "tests/cli/test_cli_plan.py",
    "explain": "tests/planner/test_profile.py",
}


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
    (folder / "tiny-llama" / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    chats = [
        [("user", f"What is {n} + 1?"), ("assistant", f"{n + 1}")] for n in range(9)
    ]
    (folder / "CHATS.jsonl").write_text(
        "\n".join(
            json.dumps({"messages": [dict(role=r, content=c) for r, c in chat]})
            for chat in chats
        )
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


@pytest.mark.each_case
@pytest.mark.parametrize(
    "page", sorted({b.page for b in all_blocks("python")} - {"README.md"})
)
def test_the_python_blocks_of_a_page_run_in_order(readme, page):
    names = dict(readme)
    # Steps of pages donate their states, so each page has one of its own.
    names["state"] = fsdp.init_state(
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
                case ast.Attribute(ast.Name("estimate"), name):
                    fields = fsdp.planner.StepEstimate.__dataclass_fields__
                    assert name in fields or hasattr(fsdp.planner.StepEstimate, name), (
                        name
                    )


def test_the_commands_run_in_order(folder, capsys):
    (folder / "DIR").symlink_to(folder / "tiny-llama")
    seen = set()
    for page, command in commands(run=True):
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
    """Whether a command takes its arguments, or says what it takes if asked."""
    try:
        tyro.cli(cli._Command, args=arguments, config=(tyro.conf.DisallowNone,))
    except SystemExit as stop:
        return stop.code == 0
    return True


def checked_by(command: str) -> Callable[[list[str]], bool] | None:
    """What tells whether a command of a program of this name would run."""
    return {
        "fsdp-jax": lambda words: parses(words[1:]),
        "make": make_target_exists,
        "pip": extra_exists,
        "python": script_takes,
        "srun": begins_with_our_command,
        "torchrun": begins_with_our_command,
        ".venv/bin/pytest": lambda words: (ROOT / words[1]).exists(),
    }.get(command)


def exists(command: str) -> bool:
    """Whether a command is one that a reader could type."""
    words = shlex.split(command)
    while re.fullmatch(r"[A-Z]+=\S+", words[0]):
        del words[0]
    check = checked_by(words[0])
    return check is not None and check(words)


def test_every_other_command_is_one_that_exists():
    assert [said for said in commands() if not exists(said[1])] == []


@pytest.mark.parametrize(
    "command",
    ["make nothing", 'pip install -e ".[none]"', "python benchmarks/none.py", "conda x"]
    + ["python benchmarks/overlap.py --none 8", "srun fsdp-jax train --none"],
)
def test_a_planted_command_that_is_none_is_caught(command):
    assert not exists(command)


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
    if not (ROOT / words[1]).exists():
        return False
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
    assert {block.language for block in every} <= {"python", "sh", "text", "yaml"}


def test_the_files_of_runs_describe_runs(tmp_path):
    found = all_blocks("yaml")
    assert found
    for block in found:
        (tmp_path / "run.yaml").write_text(block.text)
        assert cli.parse(["train", str(tmp_path / "run.yaml")]).steps


def wrong_words(text: str) -> list[str]:
    """Names of ours, said with `fsdp.` or `bridge.` before them, that are none."""
    codes = re.findall(r"`([^`\n]+)`", text)
    named = [
        (package, name.rstrip("."))
        for code in codes
        for package, name in re.findall(
            r"(?<![\w./])(fsdp|bridge)\.([a-zA-Z][\w.]*)", code
        )
    ]
    return [
        f"{package}.{name}" for package, name in named if not is_name(package, name)
    ]


def is_name(package: str, name: str) -> bool:
    try:
        operator.attrgetter(name)({"fsdp": fsdp, "bridge": bridge}[package])
    except AttributeError:
        return False
    return True


def test_every_word_of_ours_is_one():
    assert {page: wrong_words(text) for page, text in pages().items()} == {
        page: [] for page in pages()
    }


def test_a_planted_word_that_is_none_is_caught():
    text = "Write `fsdp.scan(layer)`, `fsdp.ops.none` or `bridge.load_none(x)`."
    assert wrong_words(text) == ["fsdp.ops.none", "bridge.load_none"]


def test_every_word_of_the_glossary_is_one():
    options = {
        *inspect.signature(fsdp.FSDPConfig).parameters,
        *inspect.signature(fsdp.MixedPrecisionPolicy).parameters,
        *inspect.signature(fsdp.make_train_step).parameters,
        *inspect.signature(fsdp.make_mesh).parameters,
        *inspect.signature(fsdp.fully_shard).parameters,
        *inspect.signature(fsdp.scan).parameters,
    }
    words = pages()["docs/pages/glossary.md"].partition("## Terms")[0]
    rows = [line.split("|") for line in words.splitlines() if line.startswith("| ")]
    assert len(rows) >= 40
    for row in rows[1:]:
        for code in re.findall(r"`([\w=]+)`", row[2]):
            name = code.partition("=")[0]
            known = name in options or hasattr(fsdp, name)
            assert known or name in MODEL_WORDS, row


# Words of the glossary that are no option of ours.
MODEL_WORDS = {"output_dtype", "cast_forward_inputs"}


def wrong_links(page: str, text: str) -> list[str]:
    """Files and links of a page that lead nowhere."""
    files = re.findall(r"`((?:notebooks|tests|benchmarks)/[\w./]*)`", text)
    wrong = [file for file in files if not (ROOT / file).exists()]
    for link in links(text):
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        # Of a picture the anchor says for which theme it is.
        is_page = target.suffix == ".md"
        if not target.exists() or (
            is_page and anchor and anchor not in anchors(target.read_text())
        ):
            wrong.append(link)
    return wrong + [
        f"{path}: {name}"
        for name, path in re.findall(r"\[`(\w+)`\]\(([^)]+\.py)\)", text)
        if not _defines((ROOT / page).parent / path, name)
    ]


def _defines(file: Path, name: str) -> bool:
    """Whether a file has the function or class that a link to it is called."""
    text = file.read_text() if file.exists() else ""
    return bool(re.search(rf"^ *(?:def|class) {name}\b", text, re.MULTILINE))


def test_files_and_links_exist():
    assert {page: wrong_links(page, text) for page, text in pages().items()} == {
        page: [] for page in pages()
    }


def test_a_planted_link_to_nowhere_is_caught():
    text = (
        "`tests/none.py`, [a](docs/none.md), [b](#measured), [c](#none), "
        "[d](docs/pages/how-to/hsdp.md#none), [e](https://example.org/none), "
        "[`rows`](docs/import_graph.py), [`nobody`](docs/import_graph.py)"
    )
    assert wrong_links("README.md", text) == [
        *("tests/none.py", "docs/none.md", "#none", "docs/pages/how-to/hsdp.md#none"),
        "docs/import_graph.py: nobody",
    ]


def test_the_readme_is_short():
    lines = README.splitlines()
    assert len(lines) < 120
    # Rows of tables are as wide as their links.
    assert max(len(line) for line in lines if not line.startswith("|")) <= 140


def test_the_picture_shows_todays_numbers():
    script = ROOT / "docs" / "picture.py"
    subprocess.run(
        [sys.executable, script, "--check"],
        check=True,
        capture_output=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


def test_a_card_has_a_picture_where_the_address_of_the_site_is_known():
    site = social_card.pages_url("https://github.com/Org/fsdp")
    assert site == "https://org.github.io/fsdp/"
    assert social_card.pages_url("") is None
    known, unknown = (
        social_card.tags("A & B", "Says.", site=each, url="https://page")
        for each in (site, None)
    )
    for tags in (known, unknown):
        assert '"og:title" content="A &amp; B"' in tags
    assert "og:image" not in unknown
    assert f'"og:image" content="{site}{social_card.PICTURE}"' in known
    assert (ROOT / "docs" / "pages" / social_card.PICTURE).is_file()


def test_the_site_lists_every_page():
    text = (ROOT / "docs" / "mkdocs.yml").read_text()
    listed = re.findall(r"([\w/-]+\.md)\s*$", text, flags=re.MULTILINE)
    assert yaml.safe_load(text)["strict"]
    there = {page.removeprefix("docs/pages/") for page in pages() if "pages" in page}
    assert set(listed) - {"contributing.md", "changelog.md"} == there
