"""Positions of a leaf's elements in the tensors of a checkpoint, without moving any."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64

from bridge._box import Box
from bridge.rules._piece import Piece


def offsets(piece: Piece) -> tuple[int, list[Int64[np.ndarray, " size"]]]:
    """Returns what each dim of a section adds to the position in the flat tensor.

    A layout is a permutation of factors, each of one dim of the leaf: the position of
    an element is a constant, and one number for its index in each dim.

    Args:
      piece: Section of a leaf and of a tensor.

    Returns:
      The constant, and for each dim of the section without stacked ones the numbers by
      index.
    """
    strides, step, constant = {}, 1, 0
    dims = zip(piece.layout.source, piece.source_shape, piece.source_box, strict=True)
    for names, size, section in reversed(list(dims)):
        stride = step
        for name in reversed(names):
            strides[name] = stride
            stride *= piece.sizes[name]
        constant += section.start * step
        step *= size
    return constant, [
        _of_dim([(piece.sizes[name], strides[name]) for name in names])
        for names in piece.layout.destination
    ]


def _of_dim(factors: Sequence[tuple[int, int]]) -> Int64[np.ndarray, " size"]:
    parts = [np.arange(size, dtype=np.int64) * stride for size, stride in factors]
    # The slowest factor first: a sum of all pairs, flattened, after each.
    join = functools.partial(functools.reduce, np.add.outer)
    return join(parts).ravel() if parts else np.zeros(1, np.int64)


def within(piece: Piece, box: Box) -> tuple[int, list[Int64[np.ndarray, " size"]]]:
    """Returns `offsets` of a part of a section.

    Args:
      piece: Section of a leaf and of a tensor.
      box: Part of `piece.inner_box`, in the leaf without stacked dims.
    """
    constant, numbers = offsets(piece)
    return constant, [
        each[part.start - section.start : part.stop - section.start]
        for each, part, section in zip(numbers, box, piece.inner_box, strict=True)
    ]
