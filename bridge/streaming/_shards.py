"""The memory that a leaf is loaded into: this process's shards, and nothing else."""

import math
from collections.abc import Iterable

import jax
import numpy as np

from bridge._box import Box, complete, shape_of, whole
from bridge._reorder import ALIGNMENT_BYTES
from bridge.rules._piece import Piece

Shards = dict[Box, np.ndarray]
"""What this process holds of a leaf; devices with the same part share one array."""


def empty_shards(leaf: jax.ShapeDtypeStruct) -> Shards:
    """Allocates what this process will hold of a leaf, so that XLA on CPU adopts it.

    All shards are cut from one allocation: large ones get large pages from the
    system, a quarter of the time that small ones cost.

    Args:
      leaf: Shape, dtype and sharding; without one, a single shard.
    """
    boxes = {whole(leaf.shape)}
    if leaf.sharding is not None:
        indices = leaf.sharding.addressable_devices_indices_map(leaf.shape)
        boxes = {complete(index or (), leaf.shape) for index in indices.values()}
    sizes = {box: math.prod(shape_of(box)) * leaf.dtype.itemsize for box in boxes}
    spans = [nbytes + -nbytes % ALIGNMENT_BYTES for nbytes in sizes.values()]
    buffer = np.empty(sum(spans) + ALIGNMENT_BYTES, np.uint8)
    start = -buffer.ctypes.data % ALIGNMENT_BYTES
    shards = {}
    for (box, nbytes), span in zip(sizes.items(), spans, strict=True):
        part = buffer[start : start + nbytes]
        shards[box] = part.view(leaf.dtype).reshape(shape_of(box))
        start += span
    return shards


def is_on_host(leaf: jax.ShapeDtypeStruct) -> bool:
    """Says whether a leaf's devices can take the host's memory as it is."""
    if leaf.sharding is None:
        return jax.default_backend() == "cpu"
    return all(device.platform == "cpu" for device in leaf.sharding.device_set)


def inner_boxes(piece: Piece, boxes: Iterable[Box]) -> tuple[Box, ...]:
    """Returns the boxes that hold a section's layer, without the stacked dims.

    Args:
      piece: The section.
      boxes: Parts of the leaf.
    """
    stacked = len(piece.position)
    found = {box[stacked:] for box in boxes if _holds(box, piece.position)}
    return tuple(sorted(found))


def planes(piece: Piece, shards: Shards) -> Shards:
    """Returns the shards' views of one layer.

    Args:
      piece: Says which place in the stacked dims.
      shards: Parts of the leaf.

    Returns:
      The parts that hold this place, by their boxes without stacked dims.
    """
    num_stacked = len(piece.position)
    found = {}
    for box, shard in shards.items():
        if _holds(box, piece.position):
            ranges = zip(piece.position, box[:num_stacked], strict=True)
            found[box[num_stacked:]] = shard[(*(i - r.start for i, r in ranges), ...)]
    return found


def _holds(box: Box, position: tuple[int, ...]) -> bool:
    stacked = zip(position, box[: len(position)], strict=True)
    return all(r.start <= i < r.stop for i, r in stacked)


def to_array(leaf: jax.ShapeDtypeStruct, shards: Shards) -> jax.Array:
    """Hands the shards of a leaf to their devices; on CPU, without a copy.

    An array may then share its memory with `shards`: nothing may write there again.
    """
    if leaf.sharding is None:
        return jax.device_put(*shards.values())
    return jax.make_array_from_callback(
        leaf.shape,
        leaf.sharding,
        lambda index: shards[complete(index or (), leaf.shape)],
    )
