"""Errors of the command line, and checks shared by several commands."""

from __future__ import annotations

import importlib
import tempfile
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType
from typing import Any

from fsdp_jax.checkpoint._orbax_handler import UNFINISHED
from fsdp_jax.checkpoint._paths import as_path, is_local
from fsdp_jax.checkpoint._run_id import RUN_ID
from fsdp_jax.checkpoint._store_lease import NAME as LEASE

# What a save that failed, or whose process was killed, leaves in an empty directory.
_UNFINISHED = (
    *(RUN_ID, f"{RUN_ID}.*.part", LEASE, f"{LEASE}.*.part", f"*{UNFINISHED}"),
)


class CheckFailed(Exception):
    """Raised if what a command verifies does not hold: status 1."""


class ChildFailed(Exception):
    """Raised if a program run by a command failed, and printed why.

    Attributes:
      status: Exit status of the program; for a signal, 128 plus its number.
    """

    def __init__(self, status: int):
        super().__init__(f"ended with status {status}")
        self.status = status


def check_creatable(path: Path, option: str) -> None:
    """Raises a `ValueError` unless `path` can be created, or is a writable directory.

    Finding out after hours of training that the result cannot be saved is too late.

    Args:
      path: File or directory to be written.
      option: Option that names it, for the message.
    """
    if not is_local(store := as_path(path)):
        _check_writable(store, option)
        return
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        raise ValueError(f"{option} '{path}': '{existing}' is not a directory.")
    try:
        # Only writing tells: root may write anywhere by permission, but not in /proc.
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise ValueError(
            f"{option} '{path}': '{existing}' is not writable ({error.strerror})."
        ) from error


def _check_writable(path: Any, option: str) -> None:
    """Raises a `ValueError` unless an object can be written to a folder of a store."""
    probe = path / "fsdp-jax-probe"
    try:
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise ValueError(f"{option} '{path}' is not writable: {error}") from error


def check_empty(path: Path, option: str) -> None:
    """Raises a `ValueError` unless `path` is an empty directory, or can be created."""
    check_creatable(path, option)
    if path.exists() and any(path.iterdir()):
        raise ValueError(
            f"{option} '{path}' is not empty. Give a new name, or remove it first."
        )


def check_unwritten(path: Path, option: str) -> None:
    """Raises a `ValueError` as `check_empty`, but for what a failed save left.

    The next save removes it, so that the command that failed can be run again.

    Args:
      path: Directory to be written.
      option: Option that names it, for the message.
    """
    left = [child.name for child in path.iterdir()] if path.is_dir() else []
    if all(any(fnmatch(name, pattern) for pattern in _UNFINISHED) for name in left):
        check_creatable(path, option)
    else:
        check_empty(path, option)


def check_absent(path: Path, option: str) -> None:
    """Raises a `ValueError` if `path` exists or cannot be created."""
    if path.exists():
        raise ValueError(
            f"{option} '{path}' exists already. Give a new name, or remove it first."
        )
    check_creatable(path, option)


def check_tolerance(tolerance: float) -> None:
    """Raises a `ValueError` unless a share is a number of at least 0.

    Args:
      tolerance: Value of `--tolerance`.
    """
    if not tolerance >= 0:
        raise ValueError(f"--tolerance {tolerance:g} must be at least 0.")


def require(module: str, purpose: str) -> ModuleType:
    """Imports an optional package.

    Args:
      module: Name of the package.
      purpose: Option or command that needs it, e.g. `"--tokenizer model"`.

    Raises:
      ValueError: If it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"{purpose} needs the package '{module}', which cannot be imported "
            f"({error}). Install it: pip install {module}"
        ) from error
