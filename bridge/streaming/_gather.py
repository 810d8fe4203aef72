"""Device-to-host transfer of sections of a leaf: one layer instead of the stack."""

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from bridge._box import Box, complete, overlap, shape_of, whole
from bridge.rules._piece import Piece
from bridge.streaming._lazy import LazyLeaf
from bridge.streaming._merged import MergedLeaf
from bridge.streaming._shards import Shards, planes, single


def gather(leaf: Any, piece: Piece) -> Shards:
    """Returns a host copy of a section, as shards.

    Args:
      leaf: Full leaf, including stacked dims. If it is not fully addressable, the call
        is collective: every process that stores part of it must call.
      piece: Section to transfer.

    Returns:
      Arrays by their boxes in the leaf, without stacked dims; together they cover the
      section, and possibly more. On CPU they are views of device memory.
    """
    section = piece.destination_box
    if isinstance(leaf, (LazyLeaf, MergedLeaf)):
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
    # Slicing on the device transfers one layer only, and avoids the host copy that jax
    # would cache for the full shard.
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
        # Replicated, so that every process can read the section from its own devices.
        sharding = NamedSharding(sharding.mesh, PartitionSpec())
    cut = jax.jit(jax.lax.dynamic_slice, static_argnums=2, out_shardings=sharding)
    starts = [r.start for r in piece.destination_box]
    section = cut(leaf, starts, shape_of(piece.destination_box))
    return np.asarray(section.addressable_data(0)).reshape(shape_of(piece.inner_box))
