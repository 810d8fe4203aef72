"""Another version in the place of a committed step: one of them whole at any moment.

A folder cannot be replaced in one move. So the new one is committed beside the old,
under a name that every reader prefers; the old is put away, the new takes its name.
Whoever is killed in between leaves the rest to the next save.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

_NEW, _OLD = ".fsdp-jax-new", ".fsdp-jax-old"


def step_folder(path: str | os.PathLike[str], step: int) -> Path:
    """The folder of a step, which need not be there."""
    new = Path(path) / f"{step}{_NEW}"
    return new if new.exists() else Path(path) / str(step)


def steps_in(path: Path) -> set[int]:
    """The numbers of all folders of steps, committed or not."""
    names = {child.name.removesuffix(_NEW) for child in path.iterdir()}
    return {int(name) for name in names if name.isdecimal()}


def replace_step(path: Path, step: int, by: Path) -> None:
    """Puts the folder `by` in the place of a step.

    Args:
      path: The directory of the run.
      step: A committed step of it.
      by: A complete folder, in the same directory.
    """
    _write_all_through(by)
    by.rename(path / f"{step}{_NEW}")
    write_through(path)  # now, before the old one goes
    finish_replacements(path)


def finish_replacements(path: Path) -> None:
    """Brings to its end what a process began that was killed."""
    for new in _with_suffix(path, _NEW):
        folder = path / new.name.removesuffix(_NEW)
        if folder.exists():
            folder.rename(path / f"{folder.name}{_OLD}")
        new.rename(folder)
    for old in _with_suffix(path, _OLD):
        shutil.rmtree(old, ignore_errors=True)


def _with_suffix(path: Path, suffix: str) -> list[Path]:
    found = path.glob(f"*{suffix}")
    return [child for child in found if child.name.removesuffix(suffix).isdecimal()]


def _write_all_through(folder: Path) -> None:
    """Has the disk hold all of a folder before the old one may go."""
    for child in folder.iterdir():
        if child.is_dir():
            _write_all_through(child)
        else:
            write_through(child)
    write_through(folder)


def write_through(path: Path) -> None:
    """Has the disk hold a file, or the names in a folder, before it returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
