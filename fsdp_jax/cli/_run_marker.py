"""Finds the run that an earlier start of the same command began."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import jax

import fsdp_jax as fsdp
from fsdp_jax.checkpoint._lease import leased
from fsdp_jax.checkpoint._multihost import exchange, together
from fsdp_jax.checkpoint._paths import as_path, is_local
from fsdp_jax.checkpoint._steps import committed_steps, newest_good, set_aside

_NAME = "fsdp-jax-train.json"
_PATHS = ("hf", "resume", "metrics")
_ABSOLUTE = "absolute"


@dataclasses.dataclass(frozen=True)
class Command:
    """Options that tell one run from another in the same directory.

    Attributes:
      hf: Value of --hf, or of --config.
      resume: Value of --resume.
      resume_step: Value of --resume-step.
      metrics: Value of --metrics.
      options: Options of a `TrainConfig` that were given.
    """

    hf: str | None
    resume: str | None
    resume_step: int | None
    metrics: str | None
    options: dict[str, Any]


def is_begun(save: Path, command: Command, *, in_place: bool) -> bool:
    """Returns whether this command began the run in its directory of checkpoints.

    Args:
      save: Directory of checkpoints.
      command: Command that is starting.
      in_place: Whether the command resumes that run by itself.

    Raises:
      ValueError: If another command began it: two runs would mix.
    """
    known, now = _known(save), _entry(command)
    if any(not _differing(before, now) for before in known):
        return True
    newest = fsdp.latest_step(save)
    if in_place or newest is None:
        return False
    differ = [
        f"{name} {_shown(there)} there, {_shown(here)} here"
        for before in known[:1]
        for name, (there, here) in _differing(before, now).items()
    ]
    raise ValueError(
        f"--save '{save}' holds step {newest} of a run that this command did not begin"
        f"{': ' * bool(differ)}{'; '.join(differ)}. Two runs would mix: save to "
        f"another directory, or go on from that one with --resume {save}."
    )


def digest_of(command: Command) -> str:
    """Returns a digest of a command as process 0 has it, in all processes."""
    typed = json.dumps(dataclasses.asdict(command), sort_keys=True, default=str)
    return exchange(hashlib.sha256(typed.encode()).hexdigest())[0]


def _entry(command: Command) -> dict[str, Any]:
    """Returns what is stored of a command: its options, and its paths from anywhere."""
    typed = dataclasses.asdict(command)
    return typed | {_ABSOLUTE: {name: _absolute(typed[name]) for name in _PATHS}}


def _absolute(path: str | None) -> str | None:
    # Of a name on the hub too, which is then compared as it was typed.
    return None if path is None else os.path.abspath(path)


def _values(entry: dict[str, Any]) -> dict[str, Any]:
    """Returns the options of a command by name."""
    own = {n: v for n, v in entry.items() if n not in ("options", _ABSOLUTE)}
    return own | entry["options"]


def _differing(
    before: dict[str, Any], now: dict[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Returns what differs between two commands, by option.

    A path differs if it was typed otherwise and leads elsewhere: the first alone says
    little after a change of directory, the second on hosts that mount it elsewhere.
    """
    there, here = _values(before), _values(now)
    return {
        name: (there.get(name), here.get(name))
        for name in {**there, **here}
        if there.get(name) != here.get(name) and not _leads_there(name, before, now)
    }


def _leads_there(name: str, before: dict[str, Any], now: dict[str, Any]) -> bool:
    there, here = (entry.get(_ABSOLUTE, {}).get(name) for entry in (before, now))
    return there is not None and there == here


def _shown(value: Any) -> str:
    return "not given" if value is None else str(value)


def mark_begun(save: Path, command: Command) -> None:
    """Records the command in its directory, in process 0, unless it is there."""
    known, now = _known(save), _entry(command)
    if now in known or jax.process_index() > 0:
        return
    if fsdp.latest_step(save) is None:
        known = []  # what another began has come to nothing
    write_in(as_path(save), _NAME, json.dumps([*known, now]))


def write_in(directory: Any, name: str, text: str) -> None:
    """Writes a file into the directory of a run, whole or not at all.

    Args:
      directory: Directory from `as_path`; created if it is absent.
      name: Name of the file.
      text: Content.
    """
    if not is_local(directory):
        (directory / name).write_text(text)
        return
    directory.mkdir(parents=True, exist_ok=True)
    part = directory / f"{name}.part"
    part.write_text(text, encoding="utf-8")
    part.replace(directory / name)


def has_written(save: Path, metrics: Path) -> bool:
    """Returns whether a start of the run in this directory wrote these metrics."""
    given = {"metrics": str(metrics), _ABSOLUTE: {"metrics": _absolute(str(metrics))}}
    return any(
        command["metrics"] == given["metrics"]
        or _leads_there("metrics", command, given)
        for command in _known(save)
    )


def _known(save: Path) -> list[dict[str, Any]]:
    """Returns the commands that began or resumed the run in a directory."""
    file = as_path(save) / _NAME
    return json.loads(file.read_bytes()) if file.exists() else []


def newest_good_step(save: Path) -> int | None:
    """Returns the newest undamaged step; damaged ones are renamed, with a message.

    Process 0 reads every byte of a step to check it, for all processes.

    Raises:
      DamagedCheckpointError: If there are steps and none is intact.
      ValueError: If one is damaged, and another process writes to the directory.
    """
    good, damaged = _looked(save)
    if not damaged:
        return good
    with leased(save):
        # Again, since another start may have renamed them and gone on meanwhile.
        good, damaged = _looked(save)
        with together("Renaming damaged steps"):
            if jax.process_index() == 0:
                _set_aside(save, damaged)
    return good


def _looked(save: Path) -> tuple[int | None, list[int]]:
    """Returns what `_find_good_step` does in process 0, in all processes."""
    with together("Looking for the newest step"):
        found = _find_good_step(save) if jax.process_index() == 0 else None
    good, damaged = exchange(found)[0]
    return good, damaged


def _find_good_step(save: Path) -> tuple[int | None, list[int]]:
    """Returns the newest undamaged step, and the damaged ones behind it."""
    # Listed once: what another process commits meanwhile has not been looked at.
    steps = committed_steps(save)
    if not steps:
        return None, []
    good = newest_good(save, steps)
    return good, [step for step in steps if step > good]


def _set_aside(save: Path, damaged: list[int]) -> None:
    for step in damaged:
        to = set_aside(save, step)
        print(f"step {step} is damaged and now called {to}", file=sys.stderr)
