"""Lazy leaves, which are read from their checkpoint on access.

A tree of them can be saved in another format, tensor by tensor, on a machine whose
memory is smaller than the model.
"""

import dataclasses

import numpy as np

from bridge._box import (
    Box,
    absolute,
    as_index,
    complete,
    overlap,
    relative,
    shape_of,
)
from bridge.formats._source import Source
from bridge.rules._mapping import Mapping
from bridge.rules._piece import Piece
from bridge.streaming._fill import start_piece
from bridge.streaming._shards import single
from bridge.streaming._workers import workers


@dataclasses.dataclass(frozen=True)
class LazyLeaf:
    """Leaf of a tree that is read from its checkpoint on access.

    Args:
      source: Checkpoint with the leaf's tensors.
      pieces: All sections of the leaf.
      shape: Shape of the full leaf, stacked layers first.
      dtype: Dtype of the leaf, the same as of its tensors.
    """

    source: Source
    pieces: tuple[Piece, ...]
    shape: tuple[int, ...]
    dtype: np.dtype

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """Reads the region selected by slices."""
        return self.read(complete(index, self.shape))

    def read(self, box: Box) -> np.ndarray:
        """Reads a box of the leaf, and only the parts of the checkpoint it needs.

        Returns:
          Array of the box. If one section contains all of it, a view in the file's
          memory order, so that writing it back does not transpose twice.
        """
        touched = [p for p in self.pieces if overlap(box, p.destination_box)]
        if len(touched) == 1 and overlap(box, touched[0].destination_box) == box:
            return self._view(touched[0], box)
        found = np.empty(shape_of(box), self.dtype)
        here = single(box, found)
        with workers() as pool:
            futures = [
                future
                for piece in touched
                for future in start_piece(pool, self.source, piece, here)
            ]
            for future in futures:
                future.result()
        return found

    def _view(self, piece: Piece, box: Box) -> np.ndarray:
        inside = relative(box, piece.destination_box)[len(piece.position) :]
        to_read, move = piece.layout.cut(inside, piece.sizes)
        slices = as_index(absolute(to_read, piece.source_box))
        return move(self.source.read(piece.source, slices)).reshape(shape_of(box))


def lazy_tree(source: Source, mapping: Mapping) -> dict[str, LazyLeaf]:
    """Returns the tree that an import would fill, without reading any data.

    Args:
      source: Checkpoint to read from.
      mapping: Rules of the model.

    Returns:
      Lazy leaves by dotted path.

    Raises:
      ValueError: If checkpoint and mapping do not match, or the tensors of one leaf
        have several dtypes. All mismatches are listed.
    """
    pieces = mapping.by_destination()
    held = set(source.keys())
    dtypes = {
        name: {source.dtype(p.source) for p in parts if p.source in held}
        for name, parts in pieces.items()
    }
    leaves = {
        name: LazyLeaf(
            source,
            tuple(parts),
            parts[0].destination_shape,
            min(dtypes[name], key=str, default=np.dtype(np.float32)),
        )
        for name, parts in pieces.items()
    }
    mapping.check(leaves, source)
    mixed = [
        f"  {name}: {', '.join(sorted(map(str, found)))}"
        for name, found in dtypes.items()
        if len(found) > 1
    ]
    if mixed:
        raise ValueError(
            f"'{source.name}' has layers of several dtypes where a tree has one leaf:\n"
            + "\n".join(mixed)
        )
    return leaves
