"""Paths of checkpoints: on a mounted file system, or in an object store."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsdp_jax._local_path import check_local
from fsdp_jax.checkpoint._bucket import (
    SCHEMES,
    TIMEOUT_SECS,
    is_outage,
    outage,
)
from fsdp_jax.checkpoint._store_path import StorePath

# One slash is enough: `Path("s3://bucket/run")` is `s3:/bucket/run`.
_URL = re.compile(rf"({'|'.join(SCHEMES)}):/+([^/].*)")
_READ_BYTES = 2**20
# How the errors of TensorStore begin: `RESOURCE_EXHAUSTED: Error writing local file`.
_STATUS = re.compile(r"(?!INVALID_ARGUMENT)[A-Z]+(_[A-Z]+)*: ")

# `Path` in annotations: a `StorePath` has the methods of it that are used here.


def as_path(path: str | os.PathLike[str]) -> Any:
    """Returns a path of a checkpoint, or of something in one.

    Args:
      path: Path, or URL of an object store.

    Returns:
      `pathlib.Path`, or a `StorePath` for `gs://` and `s3://`.

    Raises:
      ValueError: If it is a URL of another scheme, or no path.
    """
    if isinstance(path, StorePath):
        return path
    if not isinstance(path, str | os.PathLike):
        raise ValueError(
            f"A {type(path).__name__} is no path of a checkpoint: the path comes first."
        )
    if found := _URL.fullmatch(os.fspath(path)):
        return StorePath.from_url(found[1], found[2])
    check_local(path, stores=SCHEMES)
    return _without_parents(Path(path))


def _without_parents(path: Path) -> Path:
    """Returns a path without `..`, which TensorStore refuses; links behind it stay."""
    if os.pardir not in path.parts:
        return path
    behind = len(path.parts) - path.parts[::-1].index(os.pardir)
    return Path(*path.parts[:behind]).resolve().joinpath(*path.parts[behind:])


def is_local(path: Any) -> bool:
    """Returns whether a path is on a file system."""
    return not isinstance(path, StorePath)


def time_limit(path: Any) -> float | None:
    """Returns the seconds that a read may take; None for no limit."""
    return None if is_local(path) else TIMEOUT_SECS


@contextmanager
def outages(path: Any) -> Iterator[None]:
    """Turns TensorStore's errors about an object store into an `ObjectStoreError`.

    Args:
      path: Folder that is written.
    """
    try:
        yield
    except Exception as error:
        if is_local(path) or isinstance(error, OSError) or not is_outage(error):
            raise
        raise outage(path, error) from error


@contextmanager
def failed_writes(path: Any) -> Iterator[None]:
    """Turns TensorStore's errors about a local file into an `OSError`.

    They are `ValueError`s, as that of a full disk is.

    Args:
      path: Folder that is written.
    """
    try:
        yield
    except ValueError as error:
        if not is_local(path) or _STATUS.match(str(error)) is None:
            raise
        raise OSError(f"Writing '{path}' failed: {error}") from error


def files_in(directory: Any) -> list[str]:
    """Returns the paths of all files below a folder, in order."""
    if isinstance(directory, StorePath):
        return directory.files()
    paths = (path for path in directory.rglob("*") if path.is_file())
    return sorted(path.relative_to(directory).as_posix() for path in paths)


def remove_tree(directory: Any) -> None:
    """Removes a folder as far as that is possible."""
    if isinstance(directory, StorePath):
        directory.rmtree()
    else:
        shutil.rmtree(directory, ignore_errors=True)


def copy_in(source: Path, target: Any) -> None:
    """Copies a file of this machine to a checkpoint."""
    if isinstance(target, StorePath):
        target.write_bytes(source.read_bytes())
    else:
        shutil.copyfile(source, target)


def of_other_size(directory: Any, sizes: Mapping[str, int]) -> set[str]:
    """Returns which files have another size.

    Args:
      directory: Folder of the files, all of which are there.
      sizes: Expected size in bytes, by path in the folder.
    """
    if isinstance(directory, StorePath):
        return directory.of_other_size(sizes)
    return {n for n, size in sizes.items() if (directory / n).stat().st_size != size}


def kvstore_spec(directory: Any) -> dict[str, Any]:
    """Returns TensorStore's spec of a folder."""
    if isinstance(directory, StorePath):
        return directory.kvstore_spec()
    return {"driver": "file", "path": f"{directory}/"}


class Ranges:
    """Reads parts of one file, and of an object several at once."""

    def __init__(self, path: Any, file: int | None):
        """Reads from a path; `file` is its descriptor on a file system."""
        self._path, self._file = path, file

    def read(self, start: int, stop: int) -> bytes:
        """Returns the bytes from `start` to `stop`, fewer at the end of the file."""
        if self._file is None:
            return self._path.read_range(start, stop)
        return os.pread(self._file, stop - start, start)

    def read_all(self, spans: list[tuple[int, int | None]]) -> Iterator[bytes]:
        """Yields the bytes of all spans in order; the last may be open, as None."""
        if self._file is None:
            reads = [self._path.start_range(*span) for span in spans]
            yield from map(self._path.await_range, reads)
            return
        size = os.fstat(self._file).st_size
        for start, stop in spans:
            end = size if stop is None else stop
            for at in range(start, end, _READ_BYTES):
                yield self.read(at, min(at + _READ_BYTES, end))


@contextmanager
def open_ranges(path: Any) -> Iterator[Ranges]:
    """Opens a file to read parts of it."""
    if isinstance(path, StorePath):
        yield Ranges(path, None)
        return
    with path.open("rb", buffering=0) as file:
        yield Ranges(path, file.fileno())
