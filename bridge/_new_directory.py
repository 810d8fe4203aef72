"""Directories that appear when they are complete, or not at all."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


def check_free(path: Path) -> None:
    """Raises a `ValueError` if `path` exists and is not an empty directory."""
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ValueError(
            f"Cannot save to '{path}': it exists and is not an empty directory. Give "
            "a new name, or remove it first."
        )


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yields a directory that becomes `path` on success, and is removed otherwise."""
    with temporary_directory(path) as directory:
        yield directory
        publish(directory, path)


@contextlib.contextmanager
def temporary_directory(path: Path) -> Iterator[Path]:
    """Yields a directory on the file system of `path`, removed unless published."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as temp:
        # Not the temporary directory itself: that one is closed to other users.
        directory = Path(temp) / "checkpoint"
        directory.mkdir()
        yield directory


def publish(directory: Path, path: Path) -> None:
    """Renames a directory once all of it, and then its name, survives a power cut."""
    for inside in (*directory.rglob("*"), directory):
        _fsync(inside)
    directory.rename(path)
    _fsync(path.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
