"""Finds the run that an earlier start of the same command began."""

from __future__ import annotations

import dataclasses
import json
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
    if now in known:
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


def _entry(command: Command) -> dict[str, Any]:
    return _with_absolute_paths(dataclasses.asdict(command))


def _with_absolute_paths(entry: dict[str, Any]) -> dict[str, Any]:
    """Returns the entry of a command as it is from any working directory."""
    found = dict(entry)
    for name in ("hf", "resume", "metrics"):
        value = found.get(name)
        # What is no path here is the name of a model on the hub, or a URL.
        if value and (name == "metrics" or Path(value).exists()):
            found[name] = str(Path(value).absolute())
    return found


def _shown(value: Any) -> str:
    return "not given" if value is None else str(value)


def _differing(
    before: dict[str, Any], now: dict[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Returns what differs between two commands, by option."""
    there, here = (
        {**{n: v for n, v in entry.items() if n != "options"}, **entry["options"]}
        for entry in (before, now)
    )
    return {
        name: (there.get(name), here.get(name))
        for name in {**there, **here}
        if there.get(name) != here.get(name)
    }


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
    wanted = str(metrics.absolute())
    return any(command["metrics"] == wanted for command in _known(save))


def _known(save: Path) -> list[dict[str, Any]]:
    """Returns the commands that began or resumed the run in a directory."""
    file = as_path(save) / _NAME
    known = json.loads(file.read_bytes()) if file.exists() else []
    return [_with_absolute_paths(entry) for entry in known]


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
