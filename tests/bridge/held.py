"""Arrays as a source, and sources as arrays."""

from types import MappingProxyType

import numpy as np

from bridge.formats._source import Source
from bridge.formats._tensor_source import TensorSource


class Held:
    """An array as a lazy tensor."""

    def __init__(self, values: np.ndarray):
        self.values, self.shape, self.dtype = values, values.shape, values.dtype

    def read(self, slices=()):
        return self.values[slices]


def held(tensors: dict[str, np.ndarray]) -> Source:
    lazy = {key: Held(values) for key, values in tensors.items()}
    return TensorSource("held", MappingProxyType(lazy))


def assert_equal(source: Source, tensors: dict[str, np.ndarray]) -> None:
    assert set(source.keys()) == set(tensors)
    for key, values in tensors.items():
        assert source.dtype(key) == values.dtype
        np.testing.assert_array_equal(source.read(key), values, err_msg=key)
