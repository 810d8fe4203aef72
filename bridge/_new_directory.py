"""Directories that appear when they are complete, or not at all."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


def check_free(path: Path) -> None:
    """Raises a `ValueError` if `path` exists and is no empty directory to replace."""
    try:
        real = path.resolve()
    except RuntimeError as error:  # Of Python before 3.13.
        raise ValueError(f"Cannot save to '{path}': {error}.") from error
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ValueError(
            f"Cannot save to '{path}': it exists and is not an empty directory. Give "
            "a new name, or remove it first."
        )
    here = real == Path.cwd().resolve()
    kinds = {"a mount point": path.is_mount(), "the working directory": here}
    if found := [kind for kind, is_one in kinds.items() if is_one]:
        raise ValueError(
            f"Cannot save to '{path}': it is {' and '.join(found)}, and what is saved "
            "replaces an empty directory once it is complete. Give a new "
            f"name in it, such as '{path / 'checkpoint'}'."
        )


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yields a directory that becomes `path` on success, and is removed otherwise.

    Raises:
      ValueError: If `check_free(path)` raises it.
    """
    check_free(path)
    with temporary_directory(path) as directory:
        yield directory
        publish(directory, path)


@contextlib.contextmanager
def temporary_directory(path: Path) -> Iterator[Path]:
    """Yields a directory on the file system of `path`, removed unless published."""
    path = path.resolve()  # A link stays one, and leads to what is published.
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as temp:
        # Not the temporary directory itself: that one is closed to other users.
        directory = Path(temp) / "checkpoint"
        directory.mkdir()
        yield directory


def publish(directory: Path, path: Path) -> None:
    """Renames a directory once all of it, and then its name, survives a power cut."""
    path = path.resolve()
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
