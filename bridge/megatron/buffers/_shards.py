"""Shards: which part of which parameter each data rank's optimizer owns."""

import dataclasses

from bridge._box import Range
from bridge.megatron.buffers._buffer_layout import Bucket, BufferLayout, Placement
from bridge.megatron.buffers._param_spec import ParamSpec


@dataclasses.dataclass(frozen=True)
class Piece:
    """A run of elements of one parameter that one rank owns.

    The same elements, counted from four places.

    Args:
      param: The parameter.
      bucket: Position of its bucket among the buffer's.
      in_param: In the parameter, flattened row by row.
      in_buffer: In the whole buffer.
      in_bucket: In the bucket.
      in_shard: In the rank's shard of the bucket.
    """

    param: ParamSpec
    bucket: int
    in_param: Range
    in_buffer: Range
    in_bucket: Range
    in_shard: Range


def shard_bucket(bucket: Bucket, num_shards: int) -> tuple[Range, ...]:
    """Returns the elements of the buffer that each rank owns of a bucket.

    Args:
      bucket: The bucket.
      num_shards: Ranks among which it is split evenly.

    Raises:
      ValueError: If it cannot be split evenly.

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
    """Returns what one rank's optimizer owns of a buffer, in the order of the buffer.

    The pieces of all ranks together are every element of every parameter once; their
    `in_shard` is where a rank's file has them.

    Args:
      layout: Layout of the buffer, made for the group that shares the optimizer.
      rank: Rank in that group.

    Raises:
      ValueError: If the layout is not sharded, or has no such rank.

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
