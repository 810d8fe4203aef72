"""Memory for transposing at speed: numpy's own loop, kept within the caches.

A transpose by numpy is slow (0.3 GB/s of bfloat16) for two reasons. It moves
bfloat16 one Python-registered element at a time: an unsigned view of the same width
moves alike, and fast. And it strides through memory by a power of two, so that all of
a column lands in a few sets of the cache: rows one cache line further apart do not.
Together, and in bands that the second-level cache holds, that is 2 GB/s a core.
"""

import math
import threading
from typing import Any, NamedTuple

import numpy as np

_MAX_TAKEN = 16  # shapes whose runs are not looked up anew
ALIGNMENT_BYTES = 64
"""A cache line; and what XLA asks of host memory that it uses without a copy."""


class Taken(NamedTuple):
    """An array in memory that is used again and again.

    Args:
      array: The array.
      runs: Its bytes, in the runs in which they lie.
    """

    array: np.ndarray
    runs: list[memoryview]


class Scratch(threading.local):
    """Memory that a thread uses again and again, for fresh pages cost more than copies.

    An array that was taken is good until the thread takes the next.
    """

    def __init__(self):
        """Holds nothing yet, in every thread."""
        self._buffer = np.empty(0, np.uint8)
        self._taken: dict[Any, Taken] = {}

    def take(
        self, shape: tuple[int, ...], dtype: np.dtype, *, spread: int | None = None
    ) -> Taken:
        """Returns an array, with whatever the memory holds.

        Args:
          shape: Its shape.
          dtype: Its dtype.
          spread: A dim along which numbers lie an odd number of cache lines apart, to
            be walked along; None for plain C order.
        """
        key = shape, dtype, spread
        if key not in self._taken:
            if len(self._taken) == _MAX_TAKEN:
                self._taken.clear()
            self._taken[key] = self._lay_out(*key)
        return self._taken[key]

    def _lay_out(
        self, shape: tuple[int, ...], dtype: np.dtype, spread: int | None
    ) -> Taken:
        dim = 0 if spread is None else spread + 1
        run_bytes = math.prod(shape[dim:]) * dtype.itemsize
        num_runs = math.prod(shape[:dim])
        lines = -(-run_bytes // ALIGNMENT_BYTES) | 1
        pitch = run_bytes if spread is None else lines * ALIGNMENT_BYTES
        if self._buffer.size < num_runs * pitch:
            self._taken.clear()  # they would keep the smaller buffer
            self._buffer = np.empty(num_runs * pitch, np.uint8)
        rows = self._buffer[: num_runs * pitch].reshape(num_runs, pitch)
        array = rows[:, :run_bytes].view(dtype).reshape(shape)
        starts = range(0, num_runs * pitch, pitch) if run_bytes else ()
        memory = self._buffer.data
        return Taken(array, [memory[i : i + run_bytes] for i in starts])


def copy(destination: np.ndarray, source: np.ndarray) -> None:
    """Copies bits between two arrays of one shape and dtype, in any memory order."""
    bits = np.dtype(f"u{source.dtype.itemsize}")
    np.copyto(destination.view(bits), source.view(bits))
