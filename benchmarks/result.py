"""The JSON of a benchmark: what was found, and of what commit, machine and load.

    conditions = result.begin(args, packages=("jax", "optax"))   # before measuring
    ...
    result.write(args, conditions, {"rows": rows})

A figure is worth as much as what is known of how it was taken, so a benchmark does not
begin on a machine that does other work, or from a tree that no commit names; `--force`
runs it all the same, and its JSON then says so.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
MOST_LOAD = 0.5
"""Processes that may be running before, for each core."""

FIELDS = ("command", "commit", "date", "versions", "machine", "load", "forced")
"""What every result says of itself, before what was found."""


@dataclasses.dataclass(frozen=True)
class Conditions:
    """What a benchmark found when it began.

    Attributes:
      commit: Hash of the commit that is checked out; None outside of git.
      date: UTC, ISO 8601.
      load: Load average of the last minute.
      versions: Package -> version, of those that are installed.
      objections: Why the result should not be taken; empty unless forced.
    """

    commit: str | None
    date: str
    load: float
    versions: Mapping[str, str]
    objections: tuple[str, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `--out` and `--force`."""
    parser.add_argument("--out", type=Path, help="write the JSON here as well")
    parser.add_argument(
        "--force",
        action="store_true",
        help="measure on a busy machine or from a changed tree too; the JSON says so",
    )


def begin(args: argparse.Namespace, packages: Iterable[str]) -> Conditions:
    """Looks at tree and machine before anything is measured.

    Args:
      args: Parsed, with what `add_arguments` added.
      packages: Distributions whose versions matter; those not installed are left out.

    Raises:
      SystemExit: If the machine is busy or the tree is changed, without `--force`.
    """
    load = os.getloadavg()[0]
    commit, changed = _commit(), _changed()
    objections = tuple(_objections(load, os.cpu_count() or 1, commit, changed))
    if objections and not args.force:
        sys.exit(f"Not measured: {'; '.join(objections)}. --force measures anyway.")
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return Conditions(commit, date, load, _versions(packages), objections)


def resumed(args: argparse.Namespace, empty: Mapping[str, Any]) -> dict[str, Any]:
    """What an earlier run found and wrote to `--out`, for one that goes on.

    Args:
      args: Parsed, with what `add_arguments` added.
      empty: What is known before the first run.
    """
    if not args.out.is_file():
        return dict(empty)
    found = json.loads(args.out.read_text())
    return {**empty, **{name: found[name] for name in found if name not in FIELDS}}


def write(
    args: argparse.Namespace,
    conditions: Conditions,
    found: Mapping[str, Any],
    *,
    show: bool = True,
) -> None:
    """Prints the result as JSON, and writes it to `--out`.

    Args:
      args: Parsed, with what `add_arguments` added.
      conditions: From `begin`.
      found: What was measured.
      show: Print it; False for what is only the state of a run that goes on.
    """
    text = json.dumps(_described(conditions) | dict(found), indent=1) + "\n"
    if show:
        print(text, end="")
    if args.out:
        args.out.write_text(text)


def _described(conditions: Conditions) -> dict[str, Any]:
    return {
        "command": " ".join(["python", *map(_shown, sys.argv)]),
        "commit": conditions.commit,
        "date": conditions.date,
        "versions": {"python": platform.python_version(), **conditions.versions},
        "machine": {"cpus": os.cpu_count(), "system": platform.platform()},
        "load": {
            "before": round(conditions.load, 2),
            "after": round(os.getloadavg()[0], 2),
        },
        "forced": list(conditions.objections),
    }


def _shown(argument: str) -> str:
    """A path below the project as it is typed from there; others by their name."""
    path = Path(argument)
    if not path.is_absolute():
        return argument
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def _objections(
    load: float, cpus: int, commit: str | None, changed: list[str]
) -> Iterable[str]:
    if load > MOST_LOAD * cpus:
        yield f"the load is {load:.1f} on {cpus} cores, above {MOST_LOAD * cpus:.1f}"
    if commit is None:
        yield "no commit is known: this is no git checkout"
    if changed:
        yield f"{len(changed)} file(s) differ from the commit: {', '.join(changed[:5])}"


def _commit() -> str | None:
    return _git("rev-parse", "HEAD").strip() or None


def _changed() -> list[str]:
    """Tracked files that were changed, but for results, which earlier runs wrote."""
    lines = _git("status", "--porcelain", "--untracked-files=no").splitlines()
    paths = [line[3:] for line in lines]
    return [path for path in paths if not (ROOT / path).is_relative_to(RESULTS)]


def _git(*words: str) -> str:
    try:
        done = subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:  # git itself is not installed
        return ""
    return done.stdout if done.returncode == 0 else ""


def _versions(packages: Iterable[str]) -> dict[str, str]:
    found = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
