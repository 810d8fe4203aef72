"""Reads and writes of exact byte ranges of files, into preallocated memory.

Reads use `preadv`: a memory map reads ahead (six times the bytes when a cold eighth of
a file is read), and a file that is truncated meanwhile kills the process with SIGBUS
instead of raising.
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

    The range is then dropped from the page cache: weights are read once, and a
    checkpoint larger than host memory would evict everything else.

    Args:
      file: Path of the file.
      offset: First byte of the range.
      out: Buffers to fill in order; their total length is the length of the range.
      ahead: Whether the kernel may read ahead, because the following bytes are read
        next. Otherwise readahead would read an eighth too much where each process
        reads its share of the rows.
      again: Whether the range will be read again, and so stays in the page cache.

    Raises:
      ValueError: If the file ends before the range does.
    """
    nbytes, done = sum(map(len, out)), 0
    descriptor = os.open(file, os.O_RDONLY)
    try:
        if not ahead:
            _advise(descriptor, 0, 0, "RANDOM")
        while done < nbytes:  # Linux reads at most 2 GiB per call
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
    """Returns the buffers still to be filled, at most as many as one call accepts."""
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
    """Appends all of `data` to a file, and starts writeback at once."""
    start = done = stream.tell()
    while done - start < len(data):  # Linux writes at most 2 GiB per call
        done += stream.write(data[done - start :])
    # On dirty pages DONTNEED starts writeback, so that a later `fsync` waits less.
    _advise(stream.fileno(), start, done - start, "DONTNEED")


def _advise(descriptor: int, offset: int, nbytes: int, advice: str) -> None:
    if hasattr(os, "posix_fadvise"):  # not available on macOS
        advice_number = getattr(os, f"POSIX_FADV_{advice}")
        os.posix_fadvise(descriptor, offset, nbytes, advice_number)
