"""Equality of nested values in which NaN equals NaN."""

from __future__ import annotations

from typing import Any

import numpy as np

from fsdp_jax.rl._jagged import Jagged


def same(a: Any, b: Any) -> bool:
    """Returns whether two arrays, jagged rows or objects are equal to the bit."""
    if type(a) is not type(b) and not (_is_array(a) and _is_array(b)):
        return False
    if isinstance(a, Jagged):
        return same(a.lengths, b.lengths) and same(a.values, b.values)
    if _is_array(a):
        return _same_arrays(np.asarray(a), np.asarray(b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or (a != a and b != b)


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _same_arrays(a: np.ndarray, b: np.ndarray) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype == object:
        return same(a.tolist(), b.tolist())
    return a.tobytes() == b.tobytes()
