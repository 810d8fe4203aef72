"""Quantized weights: what a format finds in a checkpoint, and how it is read."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from bridge._box import Box
from bridge.formats._source import Source

Settings = Mapping[str, Any]
"""`quantization_config` of a `config.json`."""


class QuantizedWeight(Protocol):
    """Weight that is stored as several tensors of a source."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the stored tensors."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the decoded weight."""
        ...

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the decoded weight."""
        ...

    @property
    def scattered(self) -> bool:
        """Whether a box of rows is scattered over the stored tensors."""
        ...

    def read(self, source: Source, box: Box) -> np.ndarray:
        """Reads a box and decodes it."""
        ...


@dataclasses.dataclass(frozen=True)
class Found:
    """Quantized weights that a format finds in a checkpoint.

    Args:
      weights: Weights by decoded name.
      wrong: Error messages by tensor name.
      unused: Names of tensors that quantize activations: a decoded model has no use
        for them.
    """

    weights: Mapping[str, QuantizedWeight]
    wrong: Mapping[str, str] = dataclasses.field(default_factory=dict)
    unused: tuple[str, ...] = ()
