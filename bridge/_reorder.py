"""Scratch memory and copies for cache-efficient transposes with numpy.

A plain numpy transpose of bfloat16 runs at 0.3 GB/s for two reasons. bfloat16 is a
user-registered dtype, which numpy copies element by element; an unsigned view of the
same width copies the same bits fast. And a power-of-two stride maps an entire column
to a few cache sets; padding each row by a cache line avoids these conflicts. With
both fixed, and in bands that fit the L2 cache, a core reaches 2 GB/s.
"""

import math
import threading
from typing import Any, NamedTuple

import numpy as np

_MAX_TAKEN = 16  # number of cached (shape, dtype, spread) layouts
ALIGNMENT_BYTES = 64
"""Cache line size; also the alignment at which XLA uses host memory without a copy."""


class Taken(NamedTuple):
    """Array in reused scratch memory.

    Args:
      array: Array with undefined contents.
      runs: Bytes of the array, one view per contiguous run, in C order.
    """

    array: np.ndarray
    runs: list[memoryview]


class Scratch(threading.local):
    """Thread-local scratch buffer: faulting in fresh pages costs more than a copy.

    An array returned by `take` is valid until the thread's next `take`.
    """

    def __init__(self):
        """Initializes an empty buffer, once per thread."""
        self._buffer = np.empty(0, np.uint8)
        self._taken: dict[Any, Taken] = {}

    def take(
        self, shape: tuple[int, ...], dtype: np.dtype, *, spread: int | None = None
    ) -> Taken:
        """Returns an uninitialized array in the scratch buffer.

        Args:
          shape: Shape of the array.
          dtype: Dtype of the array.
          spread: Dim whose stride is padded to an odd number of cache lines, for fast
            strided access along it; None for plain C order.
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
        # An odd number of cache lines: a power-of-two pitch would map all rows to the
        # same few cache sets.
        lines = -(-run_bytes // ALIGNMENT_BYTES) | 1
        pitch = run_bytes if spread is None else lines * ALIGNMENT_BYTES
        if self._buffer.size < num_runs * pitch:
            self._taken.clear()  # cached views would keep the old buffer alive
            self._buffer = np.empty(num_runs * pitch, np.uint8)
        rows = self._buffer[: num_runs * pitch].reshape(num_runs, pitch)
        array = rows[:, :run_bytes].view(dtype).reshape(shape)
        starts = range(0, num_runs * pitch, pitch) if run_bytes else ()
        memory = self._buffer.data
        return Taken(array, [memory[i : i + run_bytes] for i in starts])


def copy(destination: np.ndarray, source: np.ndarray) -> None:
    """Copies bits between two arrays of one shape and dtype, in any memory order."""
    # numpy copies unsigned integers much faster than user-registered dtypes, and has
    # none of 16 bytes.
    size = source.dtype.itemsize
    bits = np.dtype(f"u{size}") if size <= 8 else source.dtype
    np.copyto(destination.view(bits), source.view(bits))
