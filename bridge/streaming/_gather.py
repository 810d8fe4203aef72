"""Sections of a leaf brought to the host: a layer, not the stack of them."""

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from bridge._box import Box, complete, overlap, shape_of, whole
from bridge.rules._piece import Piece
from bridge.streaming._lazy import LazyLeaf
from bridge.streaming._shards import Shards, planes, single


def gather(leaf: Any, piece: Piece) -> Shards:
    """Returns the host's copy of a section, cut as the devices hold it.

    Args:
      leaf: The whole leaf, stacked dims and all. If other processes hold part of it,
        all of them must call this alike.
      piece: The section.

    Returns:
      Arrays by their boxes in the leaf, without stacked dims; together they are the
      section, and may hold more. Views of device memory where the device is the host.
    """
    section = piece.destination_box
    if isinstance(leaf, LazyLeaf):
        return planes(piece, single(section, leaf.read(section)))
    if not isinstance(leaf, jax.Array):
        return planes(piece, single(whole(leaf.shape), np.asarray(leaf)))
    if not leaf.is_fully_addressable:
        return single(piece.inner_box, _from_all(leaf, piece))
    found: Shards = {}
    for shard in leaf.addressable_shards:
        box = complete(shard.index, leaf.shape)
        common = overlap(box, section)
        inner = box[len(piece.position) :]
        if common is not None and (inner,) not in found:
            found |= _from_device(shard, box, piece)
    return found


def _from_device(shard: Any, box: Box, piece: Piece) -> Shards:
    if shard.device.platform == "cpu":
        return planes(piece, single(box, np.asarray(shard.data)))
    # Only the layer crosses over, and jax keeps no copy of the shard on the host.
    num_stacked = len(piece.position)
    starts = [0] * len(box)
    for dim, place in enumerate(piece.position):
        starts[dim] = place - box[dim].start
    inner = shape_of(box[num_stacked:])
    layer = _cut(shard.data, starts, (1,) * num_stacked + inner)
    return single(box[num_stacked:], np.asarray(layer).reshape(inner))


_cut = jax.jit(jax.lax.dynamic_slice, static_argnums=2)


def _from_all(leaf: jax.Array, piece: Piece) -> np.ndarray:
    sharding = leaf.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec())
    cut = jax.jit(jax.lax.dynamic_slice, static_argnums=2, out_shardings=sharding)
    starts = [r.start for r in piece.destination_box]
    section = cut(leaf, starts, shape_of(piece.destination_box))
    return np.asarray(section.addressable_data(0)).reshape(shape_of(piece.inner_box))
