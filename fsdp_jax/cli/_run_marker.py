"""How a command that was stopped finds the run it began, and goes on with it."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import jax

import fsdp_jax as fsdp
from fsdp_jax.checkpoint._multihost import exchange, together
from fsdp_jax.checkpoint._steps import committed_steps, resolve_step, set_aside

_NAME = "fsdp-jax-train.json"


@dataclasses.dataclass(frozen=True)
class Command:
    """What tells one run from another in the same directory.

    Attributes:
      hf: The options of these names.
      resume: Likewise.
      resume_step: Likewise.
      metrics: Likewise.
      recipe: What was typed of it.
    """

    hf: str | None
    resume: str | None
    resume_step: int | None
    metrics: str | None
    recipe: dict[str, Any]


def is_begun(save: Path, command: Command, *, in_place: bool) -> bool:
    """Whether this command began what is in its directory of checkpoints.

    Args:
      save: The directory.
      command: The one that is starting.
      in_place: Whether it says itself that it goes on with what is there.

    Raises:
      ValueError: If another one did, or something else: two runs would mix.
    """
    known, now = _known(save), dataclasses.asdict(command)
    if now in known:
        return True
    newest = fsdp.latest_step(save)
    if in_place or newest is None:
        return False
    differ = [
        f"{name} {before.get(name)} there, {value} here"
        for before in known[:1]
        for name, value in now.items()
        if before.get(name) != value
    ]
    raise ValueError(
        f"--save '{save}' holds step {newest} of a run that this command did not begin"
        f"{': ' * bool(differ)}{'; '.join(differ)}. Two runs would mix: save to "
        f"another directory, or go on from that one with --resume {save}."
    )


def mark_begun(save: Path, command: Command) -> None:
    """Leaves word of the command in its directory, if none is there yet.

    The first process does.
    """
    known, now = _known(save), dataclasses.asdict(command)
    if now in known or jax.process_index() > 0:
        return
    if fsdp.latest_step(save) is None:
        known = []  # what another began has come to nothing
    save.mkdir(parents=True, exist_ok=True)
    part = save / f"{_NAME}.part"
    part.write_text(json.dumps([*known, now]))
    part.replace(save / _NAME)


def _known(save: Path) -> list[dict[str, Any]]:
    """The commands that have begun, or gone on with, what is in a directory."""
    file = save / _NAME
    return json.loads(file.read_bytes()) if file.exists() else []


def newest_good_step(save: Path) -> int | None:
    """Returns the newest undamaged step; sets damaged later ones aside and says so.

    The first process looks, for all. Every byte of a step is read to know that.

    Raises:
      DamagedCheckpointError: If there are steps and all of them are damaged.
    """
    with together("Looking for the newest step"):
        good = _find_good_step(save) if jax.process_index() == 0 else None
    return exchange(good)[0]


def _find_good_step(save: Path) -> int | None:
    if not committed_steps(save):
        return None
    good = resolve_step(save, "latest-good")
    for step in committed_steps(save):
        if step > good:
            to = set_aside(save, step)
            print(f"step {step} is damaged and now called {to}", file=sys.stderr)
    return good
