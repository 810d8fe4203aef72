"""Shards: the part of each parameter that each data-parallel rank's optimizer owns."""

import dataclasses

from bridge._box import Range
from bridge.megatron.buffers._buffer_layout import Bucket, BufferLayout, Placement
from bridge.megatron.buffers._param_spec import ParamSpec


@dataclasses.dataclass(frozen=True)
class Piece:
    """Contiguous elements of one parameter that one rank owns.

    The four ranges describe the same elements relative to different origins.

    Args:
      param: Parameter that the elements belong to.
      bucket: Index of the bucket that contains the elements.
      in_param: Element range in the parameter, flattened in C order.
      in_buffer: Element range in the buffer.
      in_bucket: Element range in the bucket.
      in_shard: Element range in the rank's shard of the bucket.
    """

    param: ParamSpec
    bucket: int
    in_param: Range
    in_buffer: Range
    in_bucket: Range
    in_shard: Range


def shard_bucket(bucket: Bucket, num_shards: int) -> tuple[Range, ...]:
    """Splits a bucket evenly into one shard per rank.

    Args:
      bucket: Bucket to split.
      num_shards: Number of ranks that share the bucket.

    Returns:
      Element range of each rank's shard, relative to the start of the buffer.

    Raises:
      ValueError: If the bucket's size is not a multiple of `num_shards`.

    Source: Megatron-LM megatron/core/distributed/param_and_grad_buffer.py::shard_buffer
    """
    if bucket.num_elements % num_shards:
        raise ValueError(
            f"Cannot split a bucket of {bucket.num_elements:,} elements evenly over "
            f"{num_shards} ranks. Lay the buffer out for dp_size={num_shards}, the "
            "size of the group that shares the optimizer."
        )
    size = bucket.num_elements // num_shards
    starts = [bucket.start + number * size for number in range(num_shards)]
    return tuple(Range(start, start + size) for start in starts)


def owned_pieces(layout: BufferLayout, rank: int) -> tuple[Piece, ...]:
    """Returns the pieces of a buffer that one rank's optimizer owns.

    The pieces of all ranks together cover every element of every parameter exactly
    once. `Piece.in_shard` is the position in the rank's checkpoint file.

    Args:
      layout: Layout of the buffer for the group of ranks that shares the optimizer.
      rank: Rank within that group.

    Returns:
      Non-empty pieces, in buffer order.

    Raises:
      ValueError: If the layout is not sharded, or `rank` is out of range.

    Source: Megatron-LM megatron/core/optimizer/distrib_optimizer.py
    ::DistributedOptimizer._build_model_gbuf_range and
    ::DistributedOptimizer._build_model_gbuf_param_range_map
    """
    if layout.num_shards is None:
        raise ValueError(
            f"A buffer of {layout.num_elements:,} elements is laid out without shards: "
            "every rank has all of it. For a distributed optimizer's files use "
            "`distributed_optimizer_layout` or `layer_wise_layout`."
        )
    if not 0 <= rank < layout.num_shards:
        raise ValueError(
            f"Rank {rank} owns nothing of a layout for {layout.num_shards} ranks. Give "
            "the rank in the group that shares the optimizer, or lay out for its size."
        )
    shards = [
        shard_bucket(bucket, layout.num_shards)[rank] for bucket in layout.buckets
    ]
    pieces = [
        _cut(place, layout.buckets[place.bucket], shards[place.bucket])
        for place in layout.placements
    ]
    return tuple(
        piece for piece in pieces if piece.in_param.start < piece.in_param.stop
    )


def _cut(place: Placement, bucket: Bucket, shard: Range) -> Piece:
    start = max(place.start, shard.start)
    # Clamp to an empty range where parameter and shard do not overlap.
    stop = max(start, min(place.stop, shard.stop))

    def counted_from(origin: int) -> Range:
        return Range(start - origin, stop - origin)

    return Piece(
        param=place.param,
        bucket=place.bucket,
        in_param=counted_from(place.start),
        in_buffer=counted_from(0),
        in_bucket=counted_from(bucket.start),
        in_shard=counted_from(shard.start),
    )
