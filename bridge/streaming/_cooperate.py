"""Cooperative reads: each process reads some rows, and devices exchange the rest.

If shards of several processes need the same rows of a file, as with column sharding
and replicas, every process would read them. Instead each reads an even part of the
rows, and one compiled function transposes, stacks and reshards: every byte is read
from storage once per job, and then communicated between devices, which is fast.
"""

import collections
import functools
import math
from collections.abc import Callable, Iterator
from concurrent.futures import Executor

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from bridge._box import Box, Range, absolute, complete, shape_of
from bridge._cast import check_range
from bridge.formats._source import Source, read_into
from bridge.rules._layout import Layout
from bridge.rules._piece import Piece
from bridge.streaming._bands import BAND_BYTES, elements_to_read
from bridge.streaming._processes import agreeing
from bridge.streaming._shards import (
    each,
    empty_shards,
    inner_boxes,
    is_on_host,
    to_array,
)

Tick = Callable[[Piece], None]


def put_together(leaf: jax.ShapeDtypeStruct, pieces: list[Piece]) -> bool:
    """Returns whether a leaf is filled cooperatively, by `fill_together`.

    True for devices with their own memory, so that the host holds one layer instead of
    the stack; and on CPU, if processes that each read their own shards would read any
    byte twice. Always False without a `NamedSharding`.

    Args:
      leaf: Abstract array with a sharding.
      pieces: All sections of the leaf.
    """
    if not isinstance(leaf.sharding, NamedSharding):
        return False
    if not is_on_host(leaf):
        return True
    if leaf.sharding.is_fully_addressable:
        return False
    held: dict[int, set[Box]] = collections.defaultdict(set)
    for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
        held[device.process_index].add(complete(index or (), leaf.shape))
    return any(
        sum(
            elements_to_read(piece, inner_boxes(piece, boxes))
            for boxes in held.values()
        )
        > piece.num_elements
        for piece in pieces
    )


def fill_together(
    pool: Executor,
    source: Source,
    pieces: list[Piece],
    leaf: jax.ShapeDtypeStruct,
    tick: Tick,
) -> jax.Array:
    """Fills a leaf section by section, reading cooperatively.

    Collective: every process of the leaf's mesh must call it with the same arguments.
    The next section is read while devices place the previous one.

    Args:
      pool: Thread pool for the reads.
      source: Checkpoint, visible to all processes.
      pieces: All sections of the leaf.
      leaf: Abstract array with a `NamedSharding`.
      tick: Callback, called with each finished section.

    Returns:
      Filled leaf.
    """
    array = _zeros(leaf.shape, leaf.dtype, leaf.sharding)()
    for piece in pieces:
        with agreeing():
            section = _read_rows(pool, source, piece, leaf)
        jax.block_until_ready(array)  # bounds memory to two sections
        place = _place(piece.layout, tuple(sorted(piece.sizes.items())), leaf.sharding)
        starts = [r.start for r in piece.destination_box]
        array = place(array, section, starts)
        tick(piece)
    return array


def _read_rows(
    pool: Executor, source: Source, piece: Piece, leaf: jax.ShapeDtypeStruct
) -> jax.Array:
    """Returns a section in the file's layout, its rows sharded over all devices."""
    assert isinstance(leaf.sharding, NamedSharding)
    mesh = leaf.sharding.mesh
    shape = shape_of(piece.source_box) or (1,)
    # Rows are padded to a multiple of the mesh size; `_place` removes the padding.
    padded = (-(-shape[0] // mesh.size) * mesh.size, *shape[1:])
    by_rows = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    dtype = source.dtype(piece.source)
    abstract = jax.ShapeDtypeStruct(padded, dtype, sharding=by_rows)
    shards = empty_shards(abstract)
    futures = [
        pool.submit(
            _read,
            source,
            piece,
            part,
            shard[part[0].start - box[0].start :],
            leaf.dtype,
        )
        for box, shard in each(shards)
        for part in _parts(box, shape, dtype.itemsize)
    ]
    for future in futures:
        future.result()
    return to_array(abstract, shards)


def _parts(box: Box, shape: tuple[int, ...], itemsize: int) -> Iterator[Box]:
    """Splits the rows of a shard, without padding, into reads of bounded size."""
    row_bytes = math.prod(shape[1:]) * itemsize
    step = max(1, BAND_BYTES // max(1, row_bytes))
    stop = min(box[0].stop, shape[0])
    for start in range(box[0].start, stop, step):
        yield (Range(start, min(start + step, stop)), *box[1:])


def _read(
    source: Source, piece: Piece, part: Box, out: np.ndarray, dtype: np.dtype
) -> None:
    box = absolute(part[: len(piece.source_box)], piece.source_box)
    rows = out[: part[0].stop - part[0].start]
    read_into(source, piece.source, box, rows.reshape(shape_of(box)), ahead=False)
    check_range(rows, dtype, piece.source)  # the devices cast


@functools.lru_cache(maxsize=256)
def _zeros(
    shape: tuple[int, ...], dtype: np.dtype, sharding: NamedSharding
) -> Callable[[], jax.Array]:
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)


@functools.lru_cache(maxsize=256)
def _place(
    layout: Layout, sizes: tuple[tuple[str, int], ...], sharding: NamedSharding
) -> Callable[..., jax.Array]:
    """Returns a jitted function that writes a padded section to its place in a leaf."""
    size_of = dict(sizes)
    names = [name for dim in layout.source for name in dim]
    order = [names.index(name) for dim in layout.destination for name in dim]
    rows = (layout.source_shape(size_of) or (1,))[0]
    inner = layout.destination_shape(size_of)

    def place(array, section, starts):
        factors = section[:rows].reshape([size_of[name] for name in names])
        values = factors.transpose(order).astype(array.dtype)
        values = values.reshape((1,) * (array.ndim - len(inner)) + inner)
        return jax.lax.dynamic_update_slice(array, values, starts)

    return jax.jit(place, donate_argnums=0, out_shardings=sharding)
