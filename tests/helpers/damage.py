"""Ways in which what lies on a disk comes to differ from what was written."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

# Orbax closes its event loop at the first array that fails; what it began for others
# ends later, unheard, and Python says so.
ORBAX_FAILS_NOISILY = pytest.mark.filterwarnings(
    "ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning"
)


def files_of(directory: Path) -> list[Path]:
    """Every file that is not empty, in one order on every machine."""
    paths = (path for path in directory.rglob("*") if path.is_file())
    return sorted(path for path in paths if path.stat().st_size)


def random_bit(directory: Path, rng: np.random.Generator) -> tuple[Path, int]:
    """A file and a bit of it, each bit of the directory as likely as any other."""
    files = files_of(directory)
    ends = np.cumsum([path.stat().st_size for path in files])
    byte = int(rng.integers(ends[-1]))
    which = int(np.searchsorted(ends, byte, side="right"))
    start = int(ends[which - 1]) if which else 0
    return files[which], 8 * (byte - start) + int(rng.integers(8))


def first_value(directory: Path, row: np.ndarray) -> tuple[Path, int]:
    """The file, and the bit of it, at which a row of a saved array begins.

    Not simply of the largest file: a database may keep, longer than it needs them,
    nodes that nothing refers to any more, and nobody reads these.
    """
    (path,) = [p for p in files_of(directory) if row.tobytes() in p.read_bytes()]
    return path, 8 * path.read_bytes().index(row.tobytes())


@contextmanager
def flipped(path: Path, bit: int) -> Iterator[None]:
    """The file with one bit the other way; put right again at the end."""
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[bit // 8] ^= 1 << bit % 8
    path.write_bytes(damaged)
    try:
        yield
    finally:
        path.write_bytes(whole)


@contextmanager
def file_size_limited(num_bytes: int) -> Iterator[None]:
    """Writing more than that to a file fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
