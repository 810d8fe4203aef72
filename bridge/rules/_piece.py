"""Pieces: what is left of the rules once sizes and layers are filled in."""

import dataclasses
import math

import numpy as np

from bridge._box import Box, shape_of
from bridge.rules._layout import Layout, Sizes


@dataclasses.dataclass(frozen=True)
class Piece:
    """One section of a source tensor that is one section of a destination leaf.

    Args:
      source: Name of the tensor.
      source_shape: Shape of the whole tensor.
      source_box: The section.
      destination: Path of the leaf.
      destination_shape: Shape of the whole leaf, stacked dims first.
      destination_box: The section, one position wide in each stacked dim.
      layout: How the two sections hold the same numbers, stacked dims aside.
      sizes: Size of each dim that the layout names.
    """

    source: str
    source_shape: tuple[int, ...]
    source_box: Box
    destination: str
    destination_shape: tuple[int, ...]
    destination_box: Box
    layout: Layout
    sizes: Sizes

    @property
    def num_elements(self) -> int:
        """Numbers in the section."""
        return math.prod(shape_of(self.source_box))

    @property
    def position(self) -> tuple[int, ...]:
        """Where the section lies in the stacked dims of the leaf."""
        num_stacked = len(self.destination_box) - len(self.layout.destination)
        return tuple(r.start for r in self.destination_box[:num_stacked])

    @property
    def inner_box(self) -> Box:
        """The section in the other dims of the leaf."""
        return self.destination_box[len(self.position) :]

    def to_source(self, array: np.ndarray) -> np.ndarray:
        """Turns the destination at `destination_box` into the source section."""
        section = array.reshape(self.layout.destination_shape(self.sizes))
        return self.layout.invert().apply(section, self.sizes)
