"""The memory that a leaf is loaded into: this process's shards, and nothing else."""

import math
from collections.abc import Iterable, Iterator

import jax
import numpy as np

from bridge._box import Box, complete, shape_of, whole
from bridge._reorder import ALIGNMENT_BYTES
from bridge.rules._piece import Piece

Shards = dict[tuple[Box, ...], np.ndarray]
"""What this process holds of a leaf; devices with the same part share one.

Shards of one shape lie in one array, of which they are the first dim, so that one copy
fills them all.
"""


def empty_shards(leaf: jax.ShapeDtypeStruct) -> Shards:
    """Allocates what this process will hold of a leaf, so that XLA on CPU adopts it.

    All shards are cut from one allocation: large ones get large pages from the
    system, a quarter of the time that small ones cost.

    Args:
      leaf: Shape, dtype and sharding, whose shards have one shape; without one, a
        single shard.
    """
    boxes = {whole(leaf.shape)}
    if leaf.sharding is not None:
        indices = leaf.sharding.addressable_devices_indices_map(leaf.shape)
        boxes = {complete(index or (), leaf.shape) for index in indices.values()}
    (shape,) = {shape_of(box) for box in boxes}
    nbytes = math.prod(shape) * leaf.dtype.itemsize
    pitch = nbytes + -nbytes % ALIGNMENT_BYTES
    buffer = np.empty(len(boxes) * pitch + ALIGNMENT_BYTES, np.uint8)
    start = -buffer.ctypes.data % ALIGNMENT_BYTES
    rows = buffer[start : start + len(boxes) * pitch].reshape(len(boxes), pitch)
    stack = rows[:, :nbytes].view(leaf.dtype).reshape(len(boxes), *shape)
    return {tuple(sorted(boxes)): stack}


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
    for boxes, stack in shards.items():
        held = [i for i, box in enumerate(boxes) if _holds(box, piece.position)]
        if held:  # in order of their boxes, stacked dims first, they are one range
            first, last = held[0], held[-1]
            ranges = zip(piece.position, boxes[first][:num_stacked], strict=True)
            inside = (i - r.start for i, r in ranges)
            key = tuple(box[num_stacked:] for box in boxes[first : last + 1])
            found[key] = stack[(slice(first, last + 1), *inside, ...)]
    return found


def single(box: Box, shard: np.ndarray) -> Shards:
    """Returns one shard as shards."""
    return {(box,): shard[None]}


def each(shards: Shards) -> Iterator[tuple[Box, np.ndarray]]:
    """Yields shards one by one, with their boxes."""
    for boxes, stack in shards.items():
        yield from zip(boxes, stack, strict=True)


def _holds(box: Box, position: tuple[int, ...]) -> bool:
    stacked = zip(position, box[: len(position)], strict=True)
    return all(r.start <= i < r.stop for i, r in stacked)


def to_array(leaf: jax.ShapeDtypeStruct, shards: Shards) -> jax.Array:
    """Hands the shards of a leaf to their devices; on CPU, without a copy.

    An array may then share its memory with `shards`: nothing may write there again.
    """
    if leaf.sharding is None:
        ((_, shard),) = each(shards)
        return jax.device_put(shard)
    by_box = dict(each(shards))
    return jax.make_array_from_callback(
        leaf.shape,
        leaf.sharding,
        lambda index: by_box[complete(index or (), leaf.shape)],
    )
