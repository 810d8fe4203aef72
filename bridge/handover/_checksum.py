"""Checksums of tensors that shards compute apart, and that changes update.

The checksum is the sum, modulo 2**64, of a number for each element, mixed of its
position and its bits. So it is the same for any sharding, and a change subtracts one
number and adds another. It finds accidents, and is no protection against intent.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64, UInt64

# The multipliers and shifts of splitmix64 (Steele, Lea and Flood 2014), public domain.
_POSITION, _BITS = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD1B54A32D192ED03)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1
_MAX_ELEMENTS = 1 << 20


def bits_of(array: np.ndarray) -> np.ndarray:
    """Returns the elements of an array as unsigned integers; a view.

    Args:
      array: C-ordered array.
    """
    return array.view(f"u{array.dtype.itemsize}")


def checksum(positions: Int64[np.ndarray, " n"], bits: np.ndarray) -> int:
    """Returns the checksum of some elements of a tensor.

    Args:
      positions: Position of each element in the flat tensor.
      bits: Elements as unsigned integers, from `bits_of`.
    """
    mixed: UInt64[np.ndarray, " n"] = positions.astype(np.uint64) * _POSITION
    mixed += (bits.astype(np.uint64) + np.uint64(1)) * _BITS
    mixed ^= mixed >> np.uint64(30)
    mixed *= _FIRST
    mixed ^= mixed >> np.uint64(27)
    mixed *= _SECOND
    mixed ^= mixed >> np.uint64(31)
    return int(mixed.sum(dtype=np.uint64))


def checksum_of_box(
    constant: int, numbers: Sequence[Int64[np.ndarray, " size"]], bits: np.ndarray
) -> int:
    """Returns the checksum of a box of elements, a few at a time.

    Args:
      constant: Constant of the positions, from `within`.
      numbers: Numbers of each dim, from `within`.
      bits: Elements as unsigned integers, in the shape of the box.
    """
    if bits.ndim == 0:
        return checksum(np.array([constant]), bits.reshape(1))
    inner = np.array(0, np.int64)
    for each in numbers[1:]:
        inner = np.add.outer(inner, each)
    step = max(1, _MAX_ELEMENTS // max(1, inner.size))
    total = 0
    for start in range(0, bits.shape[0], step):
        rows = numbers[0][start : start + step] + constant
        positions = np.add.outer(rows, inner.ravel()).ravel()
        total += checksum(positions, bits[start : start + step].reshape(-1))
    return total & _MASK


def updated(total: int, old: int, new: int) -> int:
    """Returns a checksum after changes.

    Args:
      total: Checksum before.
      old: Checksum of the changed elements before.
      new: Checksum of the changed elements after.
    """
    return (total - old + new) & _MASK
