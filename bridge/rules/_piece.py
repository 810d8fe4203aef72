"""Pieces: rules with sizes and layer numbers substituted."""

import dataclasses
import math

import numpy as np

from bridge._box import Box, shape_of
from bridge.rules._layout import Layout, Sizes


@dataclasses.dataclass(frozen=True)
class Piece:
    """Section of a source tensor and the section of a destination leaf it maps to.

    Args:
      source: Name of the tensor.
      source_shape: Shape of the full tensor.
      source_box: Section of the tensor.
      destination: Path of the leaf.
      destination_shape: Shape of the full leaf, stacked dims first.
      destination_box: Section of the leaf, one position wide in each stacked dim.
      layout: Layout between the two sections, without stacked dims.
      sizes: Size of each dim that the layout names.
      integers: Integer dtype of the tensor in a file that is written, where the leaf
        holds a table as floating point numbers; None for weights.
    """

    source: str
    source_shape: tuple[int, ...]
    source_box: Box
    destination: str
    destination_shape: tuple[int, ...]
    destination_box: Box
    layout: Layout
    sizes: Sizes
    integers: str | None = None

    @property
    def num_elements(self) -> int:
        """Number of elements in the section."""
        return math.prod(shape_of(self.source_box))

    @property
    def position(self) -> tuple[int, ...]:
        """Index of the section in the stacked dims of the leaf."""
        num_stacked = len(self.destination_box) - len(self.layout.destination)
        return tuple(r.start for r in self.destination_box[:num_stacked])

    @property
    def inner_box(self) -> Box:
        """Section in the non-stacked dims of the leaf."""
        return self.destination_box[len(self.position) :]

    def to_source(self, array: np.ndarray) -> np.ndarray:
        """Converts the destination at `destination_box` to the source section."""
        section = array.reshape(self.layout.destination_shape(self.sizes))
        return self.layout.invert().apply(section, self.sizes)
