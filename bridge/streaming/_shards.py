"""Host memory that a leaf is loaded into: the shards of this process only."""

import math
from collections.abc import Iterable, Iterator

import jax
import numpy as np

from bridge._box import Box, complete, shape_of, whole
from bridge._reorder import ALIGNMENT_BYTES
from bridge.rules._piece import Piece

Shards = dict[tuple[Box, ...], np.ndarray]
"""Addressable shards of a leaf by box; devices with equal boxes share a shard.

Shards of one shape are stacked in one array, along its first dim, so that one copy can
fill them all.
"""


def empty_shards(leaf: jax.ShapeDtypeStruct) -> Shards:
    """Allocates the addressable shards of a leaf, aligned for zero-copy on XLA:CPU.

    All shards are views of one allocation: a large allocation gets huge pages, which
    takes a quarter of the time of small ones.

    Args:
      leaf: Abstract array whose sharding has shards of equal shape; without a
        sharding, there is a single shard.
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
    """Returns whether a leaf's devices are CPUs, which use host memory directly."""
    if leaf.sharding is None:
        return jax.default_backend() == "cpu"
    return all(device.platform == "cpu" for device in leaf.sharding.device_set)


def inner_boxes(piece: Piece, boxes: Iterable[Box]) -> tuple[Box, ...]:
    """Returns the boxes that contain a section's layer, without the stacked dims.

    Args:
      piece: Section of the leaf.
      boxes: Boxes of the leaf's shards.
    """
    stacked = len(piece.position)
    found = {box[stacked:] for box in boxes if _holds(box, piece.position)}
    return tuple(sorted(found))


def planes(piece: Piece, shards: Shards) -> Shards:
    """Returns views of the shards at one layer.

    Args:
      piece: Section at the layer's position in the stacked dims.
      shards: Shards of the leaf.

    Returns:
      Views of the shards that contain this position, by their boxes without stacked
      dims.
    """
    num_stacked = len(piece.position)
    found = {}
    for boxes, stack in shards.items():
        held = [i for i, box in enumerate(boxes) if _holds(box, piece.position)]
        # Boxes are sorted, stacked dims first: shards of one layer are one range.
        if held:
            first, last = held[0], held[-1]
            ranges = zip(piece.position, boxes[first][:num_stacked], strict=True)
            inside = (i - r.start for i, r in ranges)
            key = tuple(box[num_stacked:] for box in boxes[first : last + 1])
            found[key] = stack[(slice(first, last + 1), *inside, ...)]
    return found


def single(box: Box, shard: np.ndarray) -> Shards:
    """Wraps a single shard as `Shards`."""
    return {(box,): shard[None]}


def each(shards: Shards) -> Iterator[tuple[Box, np.ndarray]]:
    """Yields the box and array of each shard."""
    for boxes, stack in shards.items():
        yield from zip(boxes, stack, strict=True)


def _holds(box: Box, position: tuple[int, ...]) -> bool:
    stacked = zip(position, box[: len(position)], strict=True)
    return all(r.start <= i < r.stop for i, r in stacked)


def to_array(leaf: jax.ShapeDtypeStruct, shards: Shards) -> jax.Array:
    """Returns the `jax.Array` made of a leaf's shards; on CPU, without a copy.

    The array may share its memory with `shards`, which must not be written afterwards.
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
