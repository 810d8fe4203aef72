"""Memory for transposing at speed: numpy's own loop, kept within the caches.

A transpose by numpy is slow (0.3 GB/s of bfloat16) for two reasons. It moves
bfloat16 one Python-registered element at a time: an unsigned view of the same width
moves alike, and fast. And it strides through memory by a power of two, so that all of
a column lands in a few sets of the cache: rows one cache line further apart do not.
Together, and in bands that the second-level cache holds, that is 2 GB/s a core.
"""

import math
import threading

import numpy as np

ALIGNMENT_BYTES = 64
"""A cache line; and what XLA asks of host memory that it uses without a copy."""


class Scratch(threading.local):
    """Memory that a thread uses again and again, for fresh pages cost more than copies.

    An array that was taken is good until the thread takes the next.
    """

    def __init__(self):
        """Holds nothing yet, in every thread."""
        self._buffer = np.empty(0, np.uint8)

    def take(
        self, shape: tuple[int, ...], dtype: np.dtype, *, spread: int | None = None
    ) -> np.ndarray:
        """Returns an array, with whatever the memory holds.

        Args:
          shape: Its shape.
          dtype: Its dtype.
          spread: A dim along which numbers lie an odd number of cache lines apart, to
            be walked along; None for plain C order.
        """
        dim = 0 if spread is None else spread + 1
        block_bytes = math.prod(shape[dim:]) * dtype.itemsize
        num_blocks = math.prod(shape[:dim])
        lines = -(-block_bytes // ALIGNMENT_BYTES) | 1
        pitch = block_bytes if spread is None else lines * ALIGNMENT_BYTES
        if self._buffer.size < num_blocks * pitch:
            self._buffer = np.empty(num_blocks * pitch, np.uint8)
        blocks = self._buffer[: num_blocks * pitch].reshape(num_blocks, pitch)
        return blocks[:, :block_bytes].view(dtype).reshape(shape)


def copy(destination: np.ndarray, source: np.ndarray) -> None:
    """Copies bits between two arrays of one shape and dtype, in any memory order."""
    bits = np.dtype(f"u{source.dtype.itemsize}")
    np.copyto(destination.view(bits), source.view(bits))
