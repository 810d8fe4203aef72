"""Replaces a committed step atomically: after a crash one of the versions is complete.

A folder cannot be replaced in one rename. So the new one is committed beside the old
one, under a name that every reader prefers; the old one is renamed, and the new one
takes its name. The next save completes a replacement that was interrupted.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
from pathlib import Path

from fsdp_jax.checkpoint._manifest import ITEM
from fsdp_jax.checkpoint._manifest import NAME as MANIFEST
from fsdp_jax.checkpoint._paths import as_path, is_local
from fsdp_jax.checkpoint._store_path import COMMIT_MARKER

# As `str` writes the number: neither "007" nor other digits than 0 to 9.
_STEP = re.compile("0|[1-9][0-9]*")
_NEW, _OLD = ".fsdp-jax-new", ".fsdp-jax-old"


def step_folder(path: str | os.PathLike[str], step: int) -> Path:
    """Returns the folder of a step, which may not exist."""
    directory = as_path(path)
    new = directory / f"{step}{_NEW}"
    # In an object store no step is replaced.
    is_new = is_local(directory) and is_committed(new)
    return new if is_new else directory / str(step)


def is_committed(folder: Path) -> bool:
    """Returns whether a folder is a complete step: it has both markers."""
    files = (folder / COMMIT_MARKER, folder / ITEM / MANIFEST)
    return all(file.is_file() for file in files)


def steps_in(path: Path) -> set[int]:
    """Returns the step numbers of all folders, committed or not."""
    replacing = [new.name.removesuffix(_NEW) for new in _replacing(path)]
    names = {*(child.name for child in path.iterdir()), *replacing}
    return {int(name) for name in names if is_step_name(name)}


def is_step_name(name: str) -> bool:
    """Returns whether a folder of this name is that of a step."""
    return _STEP.fullmatch(name) is not None


def replace_step(path: Path, step: int, by: Path) -> None:
    """Replaces the folder of a step by the folder `by`.

    Args:
      path: Directory of the run.
      step: Committed step.
      by: Complete folder in the same directory.
    """
    _write_all_through(by)
    by.rename(path / f"{step}{_NEW}")
    write_through(path)  # The new name must be on disk before the old step is removed.
    finish_replacements(path)


def finish_replacements(path: Path) -> None:
    """Completes replacements that were interrupted."""
    for new in _replacing(path):
        folder = path / new.name.removesuffix(_NEW)
        if folder.exists():
            folder.rename(_free_name(path, folder.name))
        new.rename(folder)
    for old in path.glob(f"*{_OLD}*"):
        step, _, number = old.name.partition(_OLD)
        if all(map(is_step_name, (step, number or "0"))) and is_committed(path / step):
            shutil.rmtree(old, ignore_errors=True)


def _free_name(path: Path, step: str) -> Path:
    """Returns a name for the old folder of a step that no earlier one still has."""
    # A folder of which a reader has a file open on NFS is not removed at once.
    numbers = itertools.chain([""], itertools.count(1))
    names = (path / f"{step}{_OLD}{number}" for number in numbers)
    return next(name for name in names if not name.exists())


def _replacing(path: Path) -> list[Path]:
    """Returns the folders that are to replace a step; each is complete."""
    return [new for new in _with_suffix(path, _NEW) if is_committed(new)]


def _with_suffix(path: Path, suffix: str) -> list[Path]:
    found = path.glob(f"*{suffix}")
    return [child for child in found if is_step_name(child.name.removesuffix(suffix))]


def _write_all_through(folder: Path) -> None:
    """Flushes a folder to disk recursively, before the old one may be removed."""
    for child in folder.iterdir():
        if child.is_dir():
            _write_all_through(child)
        else:
            write_through(child)
    write_through(folder)


def write_through(path: Path) -> None:
    """Flushes a file, or the entries of a folder, to disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
