"""Vocabulary padding: rows of embedding and head that belong to no token."""

import dataclasses
from types import MappingProxyType
from typing import Any

import numpy as np

from bridge._box import Range, whole
from bridge.formats._source import Source
from bridge.formats._tensor_source import TensorSource
from bridge.megatron._names import EMBEDDING, HEAD
from bridge.megatron._views import Section

PADDED = (EMBEDDING, HEAD, "output_layer.bias")
"""Canonical names of tensors with one row per token of the vocabulary."""


def trim_vocab(source: Source, vocab_size: int) -> Source:
    """Returns a lazy view of a model's tensors without vocabulary padding.

    Megatron pads the vocabulary to a multiple that depends on the run's tensor
    parallelism. Only the tokenizer or the model config knows the unpadded size.

    Args:
      source: Tensors of the model by canonical name.
      vocab_size: Number of tokens in the vocabulary, without padding.

    Raises:
      ValueError: If a tensor has fewer rows than `vocab_size`.
    """
    tensors: dict[str, Any] = {key: Keyed(source, key) for key in source.keys()}
    for key in (key for key in PADDED if key in tensors):
        shape = source.shape(key)
        if shape[0] < vocab_size:
            raise ValueError(
                f"'{source.name}': '{key}' has {shape[0]:,} rows, fewer than the "
                f"{vocab_size:,} words of the vocabulary."
            )
        box = (Range(0, vocab_size), *whole(shape)[1:])
        tensors[key] = Section(tensors[key], box)
    return TensorSource(source.name, MappingProxyType(tensors))


def pad_vocab(key: str, array: np.ndarray, multiple: int) -> np.ndarray:
    """Pads embedding or head with rows of zeros, as Megatron does.

    Args:
      key: Canonical name of the tensor. Tensors not in `PADDED` are returned unchanged.
      array: Unsharded tensor.
      multiple: Divisor of the padded number of rows: `make_vocab_size_divisible_by`
        times the number of tensor-parallel ranks.
    """
    shape = padded_shape(key, array.shape, multiple)
    if shape == array.shape:
        return array
    padded = np.zeros(shape, array.dtype)
    padded[: array.shape[0]] = array
    return padded


def padded_shape(key: str, shape: tuple[int, ...], multiple: int) -> tuple[int, ...]:
    """Returns the shape that `pad_vocab` gives a tensor."""
    return (shape[0] + -shape[0] % multiple, *shape[1:]) if key in PADDED else shape


@dataclasses.dataclass(frozen=True)
class Keyed:
    """Lazy tensor that reads one key of a source.

    Args:
      source: Source that holds the tensor.
      key: Name of the tensor.
    """

    source: Source
    key: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return self.source.shape(self.key)

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the tensor as stored."""
        return self.source.dtype(self.key)

    def read(self, slices: tuple[slice, ...] = ()) -> np.ndarray:
        """Reads the tensor, or a box of it."""
        return self.source.read(self.key, slices)
