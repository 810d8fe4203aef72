"""Exact byte ranges of files, read into memory that is there already.

Reads are `pread`s: a memory map reads ahead, six times the bytes of a cold eighth, and
a file that is cut short meanwhile kills the process instead of raising.
"""

import os
from pathlib import Path

import numpy as np

_MAX_BUFFERS = os.sysconf("SC_IOV_MAX")


def read_rows(file: Path, offset: int, rows: np.ndarray) -> None:
    """Reads one range of a file into rows, which need not follow each other in memory.

    What was read is dropped from the system's cache: weights are read once, and a
    checkpoint larger than the host would push out everything else.

    Args:
      file: The file.
      offset: First byte of the range.
      rows: uint8, `row byte`, each row contiguous; filled row after row.

    Raises:
      ValueError: If the file ends before the range does.
    """
    descriptor = os.open(file, os.O_RDONLY)
    try:
        for start in range(0, len(rows), _MAX_BUFFERS):
            buffers = [row.data for row in rows[start : start + _MAX_BUFFERS]]
            _fill(file, descriptor, offset + start * rows.shape[1], buffers)
        if hasattr(os, "posix_fadvise"):  # not on macOS
            os.posix_fadvise(descriptor, offset, rows.size, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _fill(file: Path, descriptor: int, offset: int, buffers: list[memoryview]) -> None:
    while buffers:
        count = os.preadv(descriptor, buffers, offset)  # Linux: at most 2 GiB a call
        if count == 0:
            missing = sum(map(len, buffers))
            raise ValueError(
                f"'{file}' ended {missing:,} bytes early: it was cut short after it "
                "was opened."
            )
        offset += count
        buffers = _behind(buffers, count)


def _behind(buffers: list[memoryview], count: int) -> list[memoryview]:
    """Returns what is left of buffers of which `count` bytes are filled."""
    for position, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[position + 1 :]]
        count -= len(buffer)
    return []
