"""Measures the published figures anew: `make figures`, `make figures ONLY="import"`.

    python benchmarks/figures.py [--list] [--only NAME ...] [--force]

A figure is a JSON in `results/` with the commands that make it. One that is of the
sources as they are now is left alone, so that a run which was interrupted goes on with
the rest; `--list` says which those are. A figure whose command fails is named at the
end, and the others are measured all the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from result import RESULTS, ROOT
from rich.console import Console
from rich.table import Table

LANES = {"jax0.10.2": ".venv", "jax0.12.0.1": ".venv312"}
"""Version of jax -> environment that has it."""
_PATHS = {"PYTHONPATH": os.pathsep.join([".", "tests", "tests/bridge"])}


@dataclasses.dataclass(frozen=True)
class Figure:
    """A result and how it is made.

    Attributes:
      name: Name of the JSON in `results/`, without its suffix.
      commands: Scripts of this folder with their options; `OUT` stands for the JSON,
        and `DIR` for a folder that is removed afterwards.
      venv: Environment to run them in, below the project.
      whole: Name and value of a count in the JSON that a finished run reaches, of a
        script that goes on where its JSON ends; None of others.
    """

    name: str
    commands: tuple[str, ...]
    venv: str = ".venv"
    whole: tuple[str, int] | None = None

    @property
    def file(self) -> Path:
        """Where the JSON is."""
        return RESULTS / f"{self.name}.json"

    @property
    def script(self) -> str:
        """Path of the first script below the project."""
        return f"benchmarks/{self.commands[0].split()[0]}"


_PICTURE = "docs/pages/explanation/published_steps.svg"
_FOREIGN = "--models llama3 qwen3 gpt2 vit scanned readme reference"
FIGURES = (
    *(
        Figure(
            f"overlap_{gpus}_{jax}", (f"overlap.py --gpus {gpus} --out OUT",), venv=venv
        )
        for gpus in (8, 64)
        for jax, venv in LANES.items()
    ),
    *(
        Figure(
            f"overlap_{decoder}_{jax}",
            (f"overlap.py --decoder {decoder} --out OUT",),
            venv=venv,
        )
        for decoder in (
            "llama-3-8b-cp",
            "llama-3-8b-float8",
            "llama-3-8b-float8-gather",
            "llama-3-70b",
            "llama-3-70b-pp",
            "mixtral-8x7b",
            "mixtral-8x7b-float8-gather",
            "mixtral-8x7b-16",
            "mixtral-8x7b-dropless",
            "deepseek-v3",
            "deepseek-v3-float8",
        )
        for jax, venv in LANES.items()
    ),
    # XLA of jax 0.12 sends rows between nodes by an all-gather unless told otherwise.
    *(
        Figure(
            f"overlap_deepseek-v3-by-node-float8{gather}_{jax}",
            (f"overlap.py --decoder deepseek-v3-by-node-float8{gather} --out OUT",),
            venv=LANES[jax],
        )
        for gather, jax in (
            ("", "jax0.10.2"),
            ("-gather", "jax0.10.2"),
            ("-gather", "jax0.12.0.1"),
        )
    ),
    Figure("gpu_check_predicted", ("gpu_check.py --predict --out OUT",)),
    Figure("experts", ("experts.py --layers 16 --out OUT",)),
    Figure(
        "foreign",
        (
            f"foreign.py {_FOREIGN} --out OUT",
            f"foreign.py {_FOREIGN} --compile-times --gpus 8 --out OUT",
        ),
        venv=".venv-foreign",
    ),
    Figure(
        "foreign_looped",
        (
            "foreign.py --models looped --layers 12 "
            "--orders prefetch=1 prefetch=0 saved --out OUT",
        ),
        venv=".venv-foreign",
    ),
    Figure(
        "foreign_12_layers",
        (
            "foreign.py --gpus 8 --layers 12 --models readme "
            "--orders prefetch=1 prefetch=0 --out OUT",
        ),
        venv=".venv-foreign",
    ),
    Figure(
        "validate_planner",
        (
            "validate_planner.py build --minutes 40",
            f"validate_planner.py report --out OUT --picture {_PICTURE}",
        ),
    ),
    Figure("import", ("import.py --dir DIR --runs 5 --out OUT",)),
    Figure("checkpoint", ("checkpoint.py --rounds 5 --out OUT",)),
    Figure(
        "checkpoint_stores",
        ("checkpoint.py --gigabytes 0.06 --rounds 0 --stores 3 --out OUT",),
    ),
    Figure("param_gather", ("param_gather.py --steps 200 --devices 4 --out OUT",)),
    Figure("float8_products", ("float8_products.py --out OUT",)),
    Figure("trl_comparison", ("trl_comparison.py --steps 50 --out OUT",)),
    Figure("resharding", ("resharding.py --out OUT",)),
    Figure("elastic", ("elastic.py --kills 50 --out OUT",), whole=("killed", 50)),
    Figure(
        "elastic_more_victims",
        ("elastic.py --victims 'two at once' 'rank 0' --kills 6 --out OUT",),
        whole=("killed", 12),
    ),
    Figure("replay", ("replay.py --flips 1000 --out OUT",), whole=("next", 1000)),
    Figure("replay_cost", ("replay.py --cost --out OUT",)),
    Figure("torture", ("torture.py --rounds 1000 --kills 250 --out OUT",)),
    Figure("coordinator_fuzz", ("coordinator_fuzz.py --out OUT",)),
    Figure(
        "config_fuzz",
        ("config_fuzz.py --cases 1000 --out OUT",),
        whole=("cases", 1000),
    ),
    Figure(
        "composition_fuzz",
        ("composition_fuzz.py --cases 2000 --out OUT",),
        whole=("cases", 2000),
    ),
    Figure(
        "composition_audit",
        ("composition_audit.py --cases 250 --out OUT",),
        whole=("cases", 250),
    ),
    Figure("planted_faults", ("planted_faults.py --out OUT",)),
    Figure("mutants", ("mutants.py cover --out OUT", "mutants.py run --out OUT")),
    Figure("long_tests", ("long_tests.py",)),
)


def main() -> int:
    """Measures what is not of these sources, or lists it."""
    options = _parse()
    chosen = [f for f in FIGURES if not options.only or f.name in options.only]
    if options.list:
        Console(soft_wrap=True).print(table(chosen))
        return 0
    failed = []
    for figure in chosen:
        if is_current(figure) and is_whole(figure):
            print(f"{figure.name}: of these sources already", flush=True)
        elif not measure(figure, force=options.force):
            failed.append(figure.name)
    if failed:
        print(f"Not measured: {', '.join(failed)}. What they said is above.")
    return int(bool(failed))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures published figures anew.")
    names = [figure.name for figure in FIGURES]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", default=[])
    parser.add_argument("--list", action="store_true", help="measure nothing")
    parser.add_argument("--force", action="store_true", help="on a busy machine too")
    return parser.parse_args()


def is_current(figure: Figure) -> bool:
    """Returns whether packages and script are those that the figure is of."""
    if not figure.file.is_file():
        return False
    commit = _found(figure)["commit"] or "none"
    of = ["git", "diff", "--quiet", commit, "--", "fsdp_jax", "bridge", figure.script]
    # 1 if they differ, 128 if there is no such commit any more.
    return subprocess.run(of, cwd=ROOT, stderr=subprocess.DEVNULL).returncode == 0


def is_whole(figure: Figure) -> bool:
    """Returns whether the run that made a figure came to its end."""
    if figure.whole is None:
        return True
    name, value = figure.whole
    return _found(figure)[name] >= value


def table(figures: Sequence[Figure]) -> Table:
    """Lists figures: their commits, and whether they are of these sources."""
    listed = Table(box=None)
    for title in ("figure", "commit", "of these sources"):
        listed.add_column(title, no_wrap=True)
    for figure in figures:
        commit = (figure.file.is_file() and _found(figure)["commit"]) or "none"
        says = "no"
        if is_current(figure):
            says = "yes" if is_whole(figure) else "in part"
        listed.add_row(figure.name, commit[:9], says)
    return listed


def measure(figure: Figure, *, force: bool) -> bool:
    """Runs the commands of a figure, and returns whether all ended well.

    A figure of other sources is measured from the beginning, also by a script that
    would go on; it is put back if nothing takes its place.
    """
    python = ROOT / figure.venv / "bin" / "python"
    if not python.is_file():
        print(f"{figure.name}: {figure.venv}/bin/python is not there.")
        return False
    before = None
    if figure.whole and figure.file.is_file() and not is_current(figure):
        before = figure.file.read_bytes()
        figure.file.unlink()
    with tempfile.TemporaryDirectory() as folder:
        ended = all(
            _run(figure, python, words_of(command, figure.file, folder, force=force))
            for command in figure.commands
        )
    if before is not None and not figure.file.exists():
        figure.file.write_bytes(before)
    return ended


def words_of(command: str, file: Path, folder: str, *, force: bool) -> list[str]:
    """Returns the arguments of a command, from its script on."""
    stands_for = {"OUT": str(file), "DIR": folder}
    script, *words = shlex.split(command)
    words = [stands_for.get(word, word) for word in words]
    forced = ["--force"] if force and str(file) in words else []
    return [f"benchmarks/{script}", *words, *forced]


def _run(figure: Figure, python: Path, words: list[str]) -> bool:
    print(f"{figure.name}: {shlex.join(words)}", flush=True)
    environment = os.environ | _PATHS
    return not subprocess.run([python, *words], cwd=ROOT, env=environment).returncode


def _found(figure: Figure) -> dict[str, Any]:
    return json.loads(figure.file.read_text())


if __name__ == "__main__":
    sys.exit(main())
