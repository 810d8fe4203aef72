"""Filling shards from a checkpoint, band by band, on several threads."""

from concurrent.futures import Executor, Future

import numpy as np

from bridge._box import Box, as_index, cover, overlap, relative, shape_of
from bridge._piece import Piece
from bridge._reorder import Scratch, copy
from bridge._shards import Shards
from bridge._source import Source, read_into

# As measured: fewer rows make short runs in the destination, more leave the cache.
_BAND_ROWS = 512
_BAND_BYTES = 8 << 20

_READ, _CAST = Scratch(), Scratch()


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
    itemsize = source.dtype(piece.source).itemsize
    row = piece.source_shape[-1] if len(piece.source_shape) > 1 else 1
    rows = _BAND_ROWS * row if len(piece.source_shape) > 1 else _BAND_BYTES
    bands = piece.bands(min(_BAND_BYTES // itemsize, rows))
    return [
        pool.submit(_fill, source, piece, group, shards)
        for band in bands
        for group in _sharing_rows(piece, _wanted(band, shards))
    ]


def _wanted(band: Box, shards: Shards) -> list[tuple[Box, Box]]:
    return [
        (box, common) for box in shards if (common := overlap(box, band)) is not None
    ]


def _fill(
    source: Source, piece: Piece, group: list[tuple[Box, Box]], shards: Shards
) -> None:
    """Reads what some shards need of a band, and copies it there."""
    to_read = [piece.box_to_read(common) for _, common in group]
    hull = cover(to_read)
    read = _READ.take(shape_of(hull), source.dtype(piece.source))
    read_into(source, piece.source, hull, read)
    read = _cast(read, shards[group[0][0]].dtype)
    for (box, common), part in zip(group, to_read, strict=True):
        values = piece.to_destination(read[as_index(relative(part, hull))], common)
        copy(shards[box][as_index(relative(common, box))], values)


def _cast(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Casts before anything is transposed, while the numbers lie in order."""
    if array.dtype == dtype:
        return array
    cast = _CAST.take(array.shape, dtype)
    np.copyto(cast, array, casting="unsafe")
    return cast


def _sharing_rows(
    piece: Piece, wanted: list[tuple[Box, Box]]
) -> list[list[tuple[Box, Box]]]:
    """Groups shards that need the same rows of the file, to read those once.

    Eight shards of the rows are eight reads of an eighth; eight shards of the columns
    are one read of everything, where one each would read the file eight times.
    """
    groups, end = [], -1
    for box, common in sorted(wanted, key=lambda w: piece.box_to_read(w[1])):
        rows = piece.box_to_read(common)[:1]
        if groups and (not rows or rows[0].start < end):
            groups[-1].append((box, common))
        else:
            groups.append([(box, common)])
        end = max([end, *(r.stop for r in rows)])
    return groups
