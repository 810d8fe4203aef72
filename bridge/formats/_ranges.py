"""Exact byte ranges of files, to and from memory that is there already.

Reads are `pread`s: a memory map reads ahead, six times the bytes of a cold eighth, and
a file that is cut short meanwhile kills the process instead of raising.
"""

import os
from collections.abc import Sequence
from io import FileIO
from pathlib import Path

import numpy as np

_MAX_RUNS = 1024  # IOV_MAX, on Linux and macOS


def read_range(
    file: Path,
    offset: int,
    out: Sequence[memoryview],
    *,
    ahead: bool = True,
    again: bool = False,
) -> None:
    """Reads one range of a file.

    What was read is dropped from the system's cache: weights are read once, and a
    checkpoint larger than the host would push out everything else.

    Args:
      file: The file.
      offset: First byte of the range.
      out: The runs of bytes to fill, one after another; as many are read.
      ahead: Whether the system may read on, for what follows is wanted next. By
        itself it would, an eighth more than is wanted where rows are shared out.
      again: Whether the range will be read once more, and so is not dropped yet.

    Raises:
      ValueError: If the file ends before the range does.
    """
    nbytes, done = sum(map(len, out)), 0
    descriptor = os.open(file, os.O_RDONLY)
    try:
        if not ahead:
            _advise(descriptor, 0, 0, "RANDOM")
        while done < nbytes:  # Linux hands out at most 2 GiB a call
            count = os.preadv(descriptor, _from(out, done), offset + done)
            if count == 0:
                raise ValueError(
                    f"'{file}' ended {nbytes - done:,} bytes early: it was cut "
                    "short after it was opened."
                )
            done += count
        if done and not again:
            _advise(descriptor, offset, done, "DONTNEED")
    finally:
        os.close(descriptor)


def _from(out: Sequence[memoryview], done: int) -> Sequence[memoryview]:
    """Returns the runs still to be filled, as many as the system takes at once."""
    first = 0
    while done >= len(out[first]):
        done -= len(out[first])
        first += 1
    rest = out[first : first + _MAX_RUNS]
    return [rest[0][done:], *rest[1:]] if done else rest


def read_bytes(file: Path, offset: int, nbytes: int) -> np.ndarray:
    """Reads one range of a file into new memory.

    Raises:
      ValueError: If the file ends before the range does.
    """
    data = np.empty(nbytes, np.uint8)
    read_range(file, offset, [data.data])
    return data


def append(stream: FileIO, data: memoryview) -> None:
    """Appends to a file, all of it, and has the disk begin on it at once."""
    start = done = stream.tell()
    while done - start < len(data):  # Linux takes at most 2 GiB a call
        done += stream.write(data[done - start :])
    # Of pages not yet written, the advice is to write them: `fsync` waits less.
    _advise(stream.fileno(), start, done - start, "DONTNEED")


def _advise(descriptor: int, offset: int, nbytes: int, advice: str) -> None:
    if hasattr(os, "posix_fadvise"):  # macOS has none
        advice_number = getattr(os, f"POSIX_FADV_{advice}")
        os.posix_fadvise(descriptor, offset, nbytes, advice_number)
