"""Tensors by name, each with a shape and a dtype; and a source that reads them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class NamedTensors:
    """Tensors by name: the part of a `Source` that reads no data.

    Args:
      name: Name of the checkpoint.
      tensors: Objects with `shape` and `dtype`, by name.
    """

    name: str
    tensors: Mapping[str, Any]

    def keys(self) -> tuple[str, ...]:
        """Returns the names of all tensors, in the order of `tensors`."""
        return tuple(self.tensors)

    def shape(self, key: str) -> tuple[int, ...]:
        """Returns the shape of a tensor."""
        return self.tensors[key].shape

    def dtype(self, key: str) -> np.dtype:
        """Returns the stored dtype of a tensor."""
        return self.tensors[key].dtype


@dataclasses.dataclass(frozen=True)
class TensorSource(NamedTensors):
    """Source of lazy tensors by name.

    Args:
      name: Name of the checkpoint.
      tensors: Objects with `shape`, `dtype` and `read(slices)`, such as `LazyTensor`,
        by name.
    """

    def read(self, key: str, slices: tuple[slice, ...] = ()) -> np.ndarray:
        """Reads a tensor, or the region selected by `slices`."""
        return self.tensors[key].read(slices)
