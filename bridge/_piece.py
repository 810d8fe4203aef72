"""Pieces: what is left of the rules once sizes and layers are filled in."""

import dataclasses
import math

import numpy as np

from bridge._box import Box, absolute, relative, shape_of, whole
from bridge._layout import Layout, Sizes


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

    def bands(self, max_elements: int) -> list[Box]:
        """Cuts `destination_box` into boxes, each of them one range of the section.

        Args:
          max_elements: Numbers in a band, if the layout lets it be.
        """
        return [
            absolute((*whole(self._stacked_shape), *band), self.destination_box)
            for band in self.layout.bands(self.sizes, max_elements)
        ]

    def box_to_read(self, wanted: Box) -> Box:
        """Returns the box of the source tensor that covers part of the destination.

        Args:
          wanted: Part of the destination leaf, inside `destination_box`.
        """
        box = self.layout.source_box(self._inside(wanted), self.sizes)
        return absolute(box, self.source_box)

    def to_destination(self, array: np.ndarray, wanted: Box) -> np.ndarray:
        """Turns the source at `box_to_read(wanted)` into the destination there."""
        part = self.layout.apply_box(array, self._inside(wanted), self.sizes)
        return part.reshape(shape_of(wanted))

    def to_source(self, array: np.ndarray) -> np.ndarray:
        """Turns the destination at `destination_box` into the source section."""
        section = array.reshape(self.layout.destination_shape(self.sizes))
        return self.layout.invert().apply(section, self.sizes)

    @property
    def _stacked_shape(self) -> tuple[int, ...]:
        num_stacked = len(self.destination_box) - len(self.layout.destination)
        return (1,) * num_stacked

    def _inside(self, wanted: Box) -> Box:
        return relative(wanted, self.destination_box)[len(self._stacked_shape) :]
