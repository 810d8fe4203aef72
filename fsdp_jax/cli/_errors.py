"""The errors of the command line, and the checks that several commands share."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import ModuleType


class CheckFailed(Exception):
    """A command did its work, and what it was to verify does not hold: status 1."""


class ChildFailed(Exception):
    """A program that a command ran has failed, and said why.

    Attributes:
      status: Its exit status; for a signal 128 and its number.
    """

    def __init__(self, status: int):
        super().__init__(f"ended with status {status}")
        self.status = status


def check_creatable(path: Path, option: str) -> None:
    """Raises a `ValueError` unless `path` can be made, or is a directory to write in.

    Finding out after hours of training that the result cannot be saved is too late.

    Args:
      path: A file or directory to be written.
      option: What the user calls it, for the message.
    """
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        raise ValueError(f"{option} '{path}': '{existing}' is no directory.")
    if not os.access(existing, os.W_OK):
        raise ValueError(f"{option} '{path}': '{existing}' is not writable.")


def check_empty(path: Path, option: str) -> None:
    """Raises a `ValueError` unless `path` is an empty directory, or can be made one."""
    check_creatable(path, option)
    if path.exists() and any(path.iterdir()):
        raise ValueError(
            f"{option} '{path}' is not empty. Give a new name, or remove it first."
        )


def check_absent(path: Path, option: str) -> None:
    """Raises a `ValueError` if there is anything at `path`, or it cannot be made."""
    if path.exists():
        raise ValueError(
            f"{option} '{path}' exists already. Give a new name, or remove it first."
        )
    check_creatable(path, option)


def require(module: str, purpose: str) -> ModuleType:
    """Imports an optional package.

    Args:
      module: Its name.
      purpose: What needs it, e.g. `"--tokenizer model"`.

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
