"""Byte ranges of files."""

import os
from pathlib import Path

import numpy as np


def pread(file: Path, offset: int, nbytes: int) -> np.ndarray:
    """Reads bytes `offset` to `offset + nbytes` of a file, to the byte.

    Raises:
      ValueError: If the file ends before that.
    """
    data = np.empty(nbytes, np.uint8)
    pread_into(file, offset, data)
    return data


def pread_into(file: Path, offset: int, data: np.ndarray) -> None:
    """Fills `data`, contiguous bytes, from byte `offset` of a file on.

    Raises:
      ValueError: If the file ends before that.
    """
    nbytes, done = data.nbytes, 0
    descriptor = os.open(file, os.O_RDONLY)
    try:
        while done < nbytes:  # Linux hands out at most 2 GiB a call
            count = os.preadv(descriptor, [data.data[done:]], offset + done)
            if count == 0:
                raise ValueError(
                    f"'{file}' ended {nbytes - done:,} bytes early: it was cut short "
                    "after it was opened."
                )
            done += count
    finally:
        os.close(descriptor)
