"""What the project promises those who carry it on: versions, lanes, hooks, pages."""

from __future__ import annotations

import functools
import graphlib
import importlib
import json
import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import error_messages
import family_table
import import_graph
import pytest
import yaml
from helpers import foreign_table

import fsdp_jax
from bridge.families import FAMILIES
from bridge.families.releases import RELEASES

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "pages" / "reference"
PACKAGES = ("fsdp_jax", "bridge")
PUBLIC = (
    *("fsdp_jax", "fsdp_jax.ops", "fsdp_jax.planner"),
    *("bridge", "bridge.models", "bridge.adapt", "bridge.adapt.equinox"),
    *("bridge.megatron", "bridge.megatron.buffers"),
)


# Versions


def test_the_changelog_begins_with_what_is_not_released_or_with_this_version():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    newest, *older = re.findall(r"^## \[(.+?)\](.*)$", changelog, flags=re.MULTILINE)
    assert newest[0] in ("Unreleased", fsdp_jax.__version__)
    for version, date in [] if newest[0] == "Unreleased" else [newest, *older]:
        assert re.fullmatch(r"\d+\.\d+\.\d+", version)
        assert re.fullmatch(r" - \d{4}-\d\d-\d\d", date)


def test_the_version_is_said_once():
    assert re.fullmatch(r"\d+\.\d+\.\d+", fsdp_jax.__version__)
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert 'dynamic = ["version"]' in pyproject
    assert not re.search(r"^version = ", pyproject, flags=re.MULTILINE)


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == fsdp_jax.__version__
    assert citation["license"] == "Apache-2.0"


def test_a_release_is_published_without_a_token_if_its_tag_is_the_version():
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    build, publish = workflow["jobs"]["build"], workflow["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert not any("password" in step.get("with", {}) for step in publish["steps"])
    (check,) = [s["run"] for s in build["steps"] if "GITHUB_REF_NAME" in str(s)]
    for tag, outcome in ((f"v{fsdp_jax.__version__}", 0), ("v99.0.0", 1)):
        environment = {"GITHUB_REF_NAME": tag, "PATH": os.environ["PATH"]}
        done = subprocess.run(["bash", "-c", check], cwd=ROOT, env=environment)
        assert done.returncode == outcome


# Lanes


def lanes() -> dict[str, list[str]]:
    """The lanes of `.ci/run`, and what make is told in each."""
    script = (ROOT / ".ci" / "run").read_text().replace("\\\n", " ")
    found = re.findall(r"^ *lane (\S+) (.*)$", script, flags=re.MULTILINE)
    return {name: told(shlex.split(words)) for name, words in found}


def told(words: list[str]) -> list[str]:
    """Without where Python and its environment are, which each machine knows."""
    return [word for word in words if not word.startswith(("PYTHON=", "VENV="))]


def jobs() -> dict[str, dict]:
    return yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]


def test_the_forge_runs_the_lanes_of_ours():
    on_the_forge = {}
    for name, job in jobs().items():
        (command,) = [step["run"] for step in job["steps"] if "run" in step]
        program, *words = shlex.split(command)
        assert program == "make"
        on_the_forge[name] = told(words)
    assert on_the_forge == lanes()
    assert len(lanes()) == 4


def test_models_of_others_are_tried_every_night_with_pinned_versions():
    path = ROOT / ".github/workflows/foreign.yml"
    workflow = yaml.safe_load(path.read_text())
    triggers = workflow[True]  # YAML 1.1 reads the key `on` as a boolean.
    assert len(triggers["schedule"][0]["cron"].split()) == 5
    (job,) = workflow["jobs"].values()
    assert [s["run"] for s in job["steps"] if "run" in s] == ["make test-foreign"]
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extra = pyproject["project"]["optional-dependencies"]["foreign"]
    assert len(extra) >= 3 and all("==" in package for package in extra)
    page = foreign_table.PAGE.read_text()
    assert all(package.replace("==", " ") in page for package in extra)


def test_both_lanes_have_their_python():
    pythons = {
        name: step["with"]["python-version"]
        for name, job in jobs().items()
        for step in job["steps"]
        if "setup-python" in step.get("uses", "")
    }
    newest = pythons.pop("test-newest-jax")
    assert newest == "3.12" and set(pythons.values()) == {"3.11"}


def test_only_the_lane_with_the_newest_takes_up_releases_unasked():
    newest = {name for name, words in lanes().items() if "CONSTRAINTS=" in words}
    assert newest == {"test-newest-jax"}
    pinned = (ROOT / "tests/constraints.txt").read_text().splitlines()
    versions = dict(line.split("==") for line in pinned)
    assert {"jax", "flax", "optax", "orbax-checkpoint", "transformers"} <= set(versions)
    assert "torch" not in versions  # TORCH= names it, with the build


def test_the_jobs_of_the_forge_are_whole():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job["runs-on"] and job["timeout-minutes"]
        assert all(set(step) <= {"uses", "with", "run"} for step in job["steps"])
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            assert re.fullmatch(
                r"actions/[\w-]+@v\d+", step.get("uses", "actions/a@v1")
            )


def test_the_hooks_are_what_lint_runs():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = {hook["entry"] for repo in config["repos"] for hook in repo["hooks"]}
    makefile = (ROOT / "Makefile").read_text()
    lint = re.search(r"^lint:.*\n((?:\t.*\n)+)", makefile, flags=re.MULTILINE)
    assert lint
    commands = lint[1].replace("$(BIN)", ".venv/bin").replace(" .\n", "\n")
    assert hooks == {line.strip() for line in commands.splitlines()}


# Pages


def documented() -> list[str]:
    pages = "\n".join(page.read_text() for page in REFERENCE.glob("*.md"))
    return re.findall(r"^::: (\S+)$", pages, flags=re.MULTILINE)


def public_names(module: ModuleType) -> set[str]:
    """What is defined or exported, but for modules and what is only imported."""
    text = Path(str(module.__file__)).read_text()
    exported = {name for name, again in re.findall(r"(\w+) as (\w+)", text)}
    own = {n for n, v in vars(module).items() if is_of(v, module) and n[0] != "_"}
    values = {name: getattr(module, name) for name in exported | own}
    return {
        f"{module.__name__}.{name}"
        for name, value in values.items()
        if not isinstance(value, ModuleType)
    }


def is_of(value: object, module: ModuleType) -> bool:
    return getattr(value, "__module__", None) == module.__name__


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_in_the_reference(name):
    known = documented()
    # The names most used of the planner are documented once, as fsdp_jax's.
    again = {n.replace("fsdp_jax.", "fsdp_jax.planner.") for n in known}
    missing = public_names(importlib.import_module(name)) - {*known, *again}
    assert not missing, f"write `::: NAME` in docs/pages/reference for {missing}"


def test_the_reference_names_nothing_else_and_nothing_twice():
    known = documented()
    assert len(known) == len(set(known)) > 150
    for name in known:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name


def untrue_links(text: str) -> list[str]:
    """Links [`name`](file.py) whose file does not define a function or class `name`."""
    found = re.findall(r"\[`(\w+)`\]\((?:\.\./)+([\w/]+\.py)\)", text)
    return [
        f"{name} in {file}"
        for name, file in found
        if not re.search(rf"^ *(def|class) {name}\b", (ROOT / file).read_text(), re.M)
    ]


def test_links_to_functions_lead_to_their_files():
    page = import_graph.PAGE.read_text()
    assert page.count(".py)") > 30
    assert untrue_links(page) == []


def test_a_planted_link_to_another_file_is_caught():
    file = "../../../fsdp_jax/checkpoint/_save.py"
    assert untrue_links(f"[`load`]({file}), [`save`]({file})") == [
        "load in fsdp_jax/checkpoint/_save.py"
    ]


ERRORS = (ROOT / "docs" / "pages" / "errors.md").read_text()


@functools.cache
def messages() -> list[error_messages.Message]:
    return [
        message
        for package in PACKAGES
        for message in error_messages.messages(ROOT, package)
    ]


def test_every_class_of_errors_is_on_the_page():
    ours = error_messages.classes(ROOT, "fsdp_jax")
    ours |= error_messages.classes(ROOT, "bridge")
    raised = {message.error for message in messages()}
    for name in {name for name in ours | raised if name[0].isupper()}:
        assert re.search(rf"`(?:fsdp\.(?:\w+\.)?)?{name}`", ERRORS), (
            f"errors.md says not {name}"
        )


def test_every_message_has_one_place_on_the_page():
    asked = re.findall(r"<!-- errors: (.*?) -->", ERRORS)
    assert len(messages()) > 400
    for module in {message.module for message in messages()}:
        places = [p for p in asked if error_messages.matches(module, p.split())]
        assert len(places) == 1, f"{module} belongs to {places} of errors.md"


def test_the_page_of_models_has_a_row_for_every_family():
    rows = family_table.table().splitlines()[2:]
    assert len(rows) == len(FAMILIES) > 40
    for row, name in zip(rows, sorted(FAMILIES), strict=True):
        _, names, models, architecture, *_ = map(str.strip, row.split("|"))
        assert (
            f"`{name}`" in names and f"`{FAMILIES[name].architecture}`" == architecture
        )
        assert models
    assert "`deepseek_v3`, `kimi_k2`" in "\n".join(rows)
    rows = family_table.releases().splitlines()[2:]
    for row, (name, release) in zip(rows, sorted(RELEASES.items()), strict=True):
        _, said, models, family, _ = map(str.strip, row.split("|"))
        assert (said, family) == (f"`{name}`", f"`{release.written_as}`") and models


def test_messages_are_read_as_they_are_written(tmp_path):
    (tmp_path / "planted").mkdir()
    (tmp_path / "planted" / "_one.py").write_text('''
def f(size):
    if size:
        raise ValueError(f"Size {size + 1}: " "too large.")
    raise _made(size)

def _made(size):
    return DamagedError(_text(size))

def _text(size):
    return f"{size} is damaged"

class DamagedError(RuntimeError):
    """A mine."""
''')
    assert error_messages.classes(tmp_path, "planted") == {"DamagedError"}
    assert [(m.function, m.error, m.text) for m in _planted(tmp_path)] == [
        ("f", "ValueError", "Size {size + 1}: too large."),
        ("f", "DamagedError", "{size} is damaged"),
    ]


def _planted(root: Path) -> list[error_messages.Message]:
    return error_messages.messages(root, "planted")


# Words

# Words of this project's own, which the field's replaced; CHANGELOG.md has both.
PRIVATE_WORDS = {
    r"\brows?_in_step\b": "params_in_step",
    r"\bmoulds?\b": "abstract",
    r"\bat rest\b|\brests as\b|\bwhat rests\b|\b(?:at|to)_rest\b": "stored",
    r"\bwhole (?:weights?\b|during a step|on every device)": "unsharded, replicated",
    r"\b(?:is|stays?|are|lie) whole\b": "unsharded, replicated, complete",
    r"\breduce_late\b|\bLate\(": "reduce_deferred, GradReduction",
    r"\bgrad_sinks?\b|\bsink=": "grad_buffer",
    r"\benter_step\b|\brest\.packed\b": "gather_for_step, to_step_layout",
    r"\bis_cut\b": "factored",
    r"\bthe wire\b|\bwire_(?:bytes|seconds|dtype)\b": "communicated, communication",
    r"\btravel(?:s|led)?\b": "is communicated, is gathered, is sent",
    r"\bdealt\b|\bdeal_out\b|\bbring_back\b": "permute, restore, split over",
    r"\bput away\b|\bpassed over\b|\bhanded\b": "stored, skipped, passed",
    r"\bforet[eo]l\w*|\bforecasts?\b": "estimate",
    r"\bsavers\b|\bcliques?\b|\btwins_of\b": "writers, replication groups, pairs",
    r"\baccumulate=": "num_microbatches=",
    r"\brng=|\bstate\.rng\b": "key",
    r"\b(?:Patience|Meeting|Attendance)\b": "Timeouts, Coordinator, Client",
    r"\bspoken of\b|\bleft aside\b": "covered by a rule, ignored",
    r"\b(?:Witness|Verdict)(?:es|s)?\b": "ReplayStep, CorruptionReport",
    r"\bspellings?\b|\btraits?\b|\bcodecs=": "key mapping, constants, transforms",
}


def private_words(text: str) -> list[str]:
    """What a text says in private words, with the field's words for it."""
    return [
        f"{found[0]}: say {better}"
        for pattern, better in PRIVATE_WORDS.items()
        for found in re.finditer(pattern, text)
    ]


def texts_of_the_project() -> dict[Path, str]:
    """Every module, page and notebook, but for what others wrote and this file."""
    folders = (*PACKAGES, "benchmarks", "docs", "examples", "notebooks", "tests")
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    for folder in folders:
        for ending in ("py", "md", "ipynb"):
            files += (ROOT / folder).rglob(f"*.{ending}")
    ours = [f for f in files if f != Path(__file__) and "golden" not in f.parts]
    return {file: prose_of(file) for file in ours}


def prose_of(file: Path) -> str:
    """A file's text; of a notebook its pages, without code and what that printed."""
    if file.suffix != ".ipynb":
        return file.read_text()
    cells = json.loads(file.read_text())["cells"]
    pages = [cell["source"] for cell in cells if cell["cell_type"] == "markdown"]
    return "\n".join("".join(page) for page in pages)


def test_no_word_of_the_projects_own_stands_for_one_of_the_field():
    found = {f: private_words(text) for f, text in texts_of_the_project().items()}
    assert {file: words for file, words in found.items() if words} == {}


def test_a_planted_private_word_is_caught():
    assert private_words("A shard travels; the weight is whole, and the rest is split.")
    assert (
        private_words("The whole batch is split; no rest, and a stringent sink.") == []
    )


# The picture of the imports


def test_the_picture_has_every_part_and_every_import():
    for package in PACKAGES:
        graph = import_graph.import_graph(ROOT, package)
        files = (ROOT / package).glob("[!_]*/__init__.py")
        assert {file.parent.name for file in files} <= set(graph)
        drawn = import_graph.draw(graph, import_graph.summaries(ROOT, package))
        assert all(f">{part}</text>" in drawn for part in graph)
        paths = ElementTree.fromstring(drawn).findall(
            "{http://www.w3.org/2000/svg}path"
        )
        assert len(paths) == sum(map(len, graph.values()))


def test_a_planted_import_is_drawn_downwards(tmp_path):
    package = tmp_path / "planted"
    (package / "top").mkdir(parents=True)
    (package / "__init__.py").write_text("from planted._low import f as f")
    (package / "_low.py").write_text('"""Is low."""\nimport json')
    (package / "_mid.py").write_text("def f():\n    from planted import _low")
    (package / "top" / "__init__.py").write_text('"""Is on top."""')
    (package / "top" / "_a.py").write_text("import planted._mid\nimport planted")
    graph = import_graph.import_graph(tmp_path, "planted")
    assert graph == {
        "__init__": {"low"},
        "low": set(),
        "mid": {"low"},
        "top": {"mid", "__init__"},
    }
    assert import_graph.rows(graph) == [["low"], ["__init__", "mid"], ["top"]]
    texts = import_graph.summaries(tmp_path, "planted")
    assert texts["low"] == "Is low." and texts["top"] == "Is on top."


def test_the_outlines_of_the_architecture_page_are_todays():
    page = import_graph.PAGE.read_text()
    assert all(f"<!-- rooms: {package} -->" in page for package in PACKAGES)
    assert import_graph.with_outlines(page) == page, "run `python docs/import_graph.py`"


def test_an_outline_leaves_out_the_imports_that_follow_from_others():
    graph = {
        "cli": {"__init__", "step", "hlo"},
        "__init__": {"step"},
        "step": {"tree"},
        **{"hlo": set(), "tree": set()},
    }
    assert import_graph.outline(graph, "planted").splitlines() == [
        " 3  cli     -> planted, hlo",
        " 2  planted -> step",
        " 1  step    -> tree",
        " 0  hlo",
        "    tree",
    ]


def test_a_ring_has_no_picture():
    with pytest.raises(graphlib.CycleError):
        import_graph.rows({"a": {"b"}, "b": {"a"}})
