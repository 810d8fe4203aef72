"""Copies between a checkpoint's tensors and shards of leaves, band by band."""

import math
from concurrent.futures import Executor, Future

import numpy as np

from bridge._box import Box, shape_of, take
from bridge._cast import cast
from bridge._reorder import Scratch, copy
from bridge.formats._source import Source, read_into
from bridge.rules._piece import Piece
from bridge.streaming._bands import Read, Section, reads
from bridge.streaming._shards import Shards, planes

_READ, _LAID_OUT = Scratch(), Scratch()


def start_piece(
    pool: Executor, source: Source, piece: Piece, shards: Shards, *, ahead: bool = True
) -> list[Future[None]]:
    """Starts to copy a section of the checkpoint to the shards that need part of it.

    Each byte is read once, regardless of the number of shards. A thread holds one
    band at a time, which bounds the bytes in flight.

    Args:
      pool: Thread pool for reads and copies.
      source: Checkpoint to read.
      piece: Section to copy.
      shards: Shards to fill.
      ahead: Whether the shards cover the entire section, so that reads are sequential
        and benefit from readahead.

    Returns:
      Futures to wait for.
    """
    here = planes(piece, shards)
    section = Section.of(piece)
    return [
        pool.submit(_fill, source, piece.source, section, band, here, ahead)
        for band in section.bands(source.dtype(piece.source).itemsize)
    ]


def start_tensor(
    pool: Executor, piece: Piece, here: Shards, tensor: np.ndarray
) -> list[Future[None]]:
    """Starts to copy a section of a leaf to its section of a tensor.

    Args:
      pool: Thread pool for the copies.
      piece: Section to copy.
      here: Shards of the section, as returned by `gather`.
      tensor: Full tensor, filled at `piece.source_box`.

    Returns:
      Futures to wait for.
    """
    section = Section.of(piece)
    return [
        pool.submit(_fill_tensor, section, band, here, tensor, piece.source)
        for band in section.bands(tensor.dtype.itemsize)
    ]


def _fill(
    source: Source, key: str, section: Section, band: Box, here: Shards, ahead: bool
) -> None:
    for read in reads(section, tuple(here), band):
        to, shape = here[read.parts[0].stack].dtype, shape_of(read.box)
        same = source.dtype(key) == to
        if same and (there := _in_place(read, here)) is not None:
            read_into(source, key, read.box, there, ahead=ahead)
            continue
        # A transpose walks along the second-to-last dim: its stride is padded to avoid
        # cache conflicts. With a cast, the cast's output is padded instead.
        in_order = all(part.move.keeps_rows for part in read.parts)
        rows = None if in_order or len(shape) < 2 else len(shape) - 2
        taken = _READ.take(shape, source.dtype(key), spread=rows if same else None)
        read_into(source, key, read.box, taken.array, ahead=ahead, runs=taken.runs)
        values = taken.array if same else _laid_out(taken.array, to, rows, key)
        for part in read.parts:
            view = part.move.view(take(values, part.cut))
            copy(take(here[part.stack], part.where).reshape(view.shape), view)


def _in_place(read: Read, here: Shards) -> np.ndarray | None:
    """Returns the destination if data can be read into it directly, else None."""
    part, *others = read.parts
    if others or not part.move.keeps_order:
        return None
    there, shape = take(here[part.stack], part.where), shape_of(read.box)
    fits = there.size == math.prod(shape) and there.flags.c_contiguous
    return there.reshape(shape) if fits else None


def _fill_tensor(
    section: Section, band: Box, here: Shards, tensor: np.ndarray, key: str
) -> None:
    for read in reads(section, tuple(here), band):
        for part in read.parts:
            view = part.move.view(take(take(tensor, read.box), part.cut))
            values = take(here[part.stack], part.where).reshape(view.shape)
            if not part.move.keeps_rows:
                innermost = part.move.order.index(len(part.move.order) - 1)
                values = _laid_out(values, tensor.dtype, innermost, key)
            elif values.dtype != tensor.dtype:
                values = _laid_out(values, tensor.dtype, None, key)
            copy(view, values)


def _laid_out(
    array: np.ndarray, dtype: np.dtype, spread: int | None, key: str
) -> np.ndarray:
    """Casts to scratch memory, with a padded stride along `spread` if given."""
    found = _LAID_OUT.take(array.shape, dtype, spread=spread).array
    if array.dtype == dtype:
        copy(found, array)
    else:
        cast(found, array, key)
    return found
