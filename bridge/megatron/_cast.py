"""Cast: a source whose trained tensors are read in another dtype."""

import dataclasses

import numpy as np

from bridge._cast import check_range
from bridge.formats._source import Source
from bridge.megatron.buffers._param_order import is_parameter


@dataclasses.dataclass(frozen=True)
class Cast:
    """Source that converts a model's parameters when they are read.

    What is not trained (a router's balancing bias) keeps its dtype, as in Megatron.

    Args:
      source: Source of the tensors by canonical name.
      to: Dtype of the parameters.
    """

    source: Source
    to: np.dtype

    @property
    def name(self) -> str:
        """Name of the underlying source, for error messages."""
        return self.source.name

    def keys(self) -> tuple[str, ...]:
        """Returns the names of all tensors."""
        return self.source.keys()

    def shape(self, key: str) -> tuple[int, ...]:
        """Returns the shape of a tensor."""
        return self.source.shape(key)

    def dtype(self, key: str) -> np.dtype:
        """Returns the dtype in which a tensor is read."""
        return self.to if is_parameter(key) else self.source.dtype(key)

    def read(self, key: str, slices: tuple[slice, ...] = ()) -> np.ndarray:
        """Reads a tensor, or a box of it, and converts it."""
        array = self.source.read(key, slices)
        check_range(array, self.dtype(key), key)
        return array.astype(self.dtype(key), copy=False)
