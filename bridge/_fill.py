"""Filling shards from a checkpoint, band by band, on several threads."""

from collections.abc import Mapping
from concurrent.futures import Executor, Future

import numpy as np

from bridge._bands import Band, bands
from bridge._box import Box, shape_of
from bridge._piece import Piece
from bridge._reorder import Scratch, copy
from bridge._shards import Shards
from bridge._source import Source, read_into

_READ, _SPREAD = Scratch(), Scratch()


def start_piece(
    pool: Executor, source: Source, piece: Piece, shards: Shards
) -> list[Future[None]]:
    """Starts to copy a section of the checkpoint to the shards that need part of it.

    Each byte is read once, whatever the number of shards. A thread holds one band,
    which bounds the bytes in flight.

    Args:
      pool: Its threads do the work.
      source: The checkpoint.
      piece: Which section, and what becomes of it.
      shards: Filled where the section belongs.

    Returns:
      What to wait for.
    """
    planes = _planes(piece, shards)
    itemsize = source.dtype(piece.source).itemsize
    return [
        pool.submit(_fill, source, piece.source, band, planes)
        for band in bands(piece, tuple(planes), itemsize)
    ]


def _planes(piece: Piece, shards: Shards) -> Shards:
    """Takes the shards' parts at a layer, by their boxes without stacked dims."""
    num_stacked = len(piece.position)
    planes = {}
    for box, shard in shards.items():
        ranges = list(zip(piece.position, box[:num_stacked], strict=True))
        if all(r.start <= i < r.stop for i, r in ranges):
            planes[box[num_stacked:]] = shard[tuple(i - r.start for i, r in ranges)]
    return planes


def _fill(
    source: Source, key: str, band: Band, planes: Mapping[Box, np.ndarray]
) -> None:
    read = _READ.take(shape_of(band.box), source.dtype(key))
    read_into(source, key, band.box, read)
    dtype = planes[band.parts[0].shard].dtype
    if read.dtype != dtype or not all(part.move.keeps_order for part in band.parts):
        read = _spread(read, dtype)
    for part in band.parts:
        copy(planes[part.shard][part.where], part.move(read[part.cut]))


def _spread(read: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Casts, and spreads the rows, while the numbers still lie in order."""
    spread = _SPREAD.take(read.shape, dtype, spread=True)
    if read.dtype == dtype:
        copy(spread, read)
    else:
        np.copyto(spread, read, casting="unsafe")
    return spread
