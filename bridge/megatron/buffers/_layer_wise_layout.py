"""Layer-wise layout: each matrix on a single rank, with work balanced over ranks.

Muon's Newton-Schulz iteration needs the complete matrix. Each shard therefore holds
complete parameters, and all shards of a bucket are padded to the size of the largest.
"""

import math
from collections.abc import Iterator, Sequence

from bridge.megatron.buffers._buffer_layout import (
    Bucket,
    BufferLayout,
    Placement,
    check,
)
from bridge.megatron.buffers._padding import (
    PARAM_START_DIVISOR,
    bucket_end_divisor,
    pad_param_start,
    pad_to_divisor,
)
from bridge.megatron.buffers._param_spec import ParamSpec

# All shards of a bucket have equal size and hold complete parameters, so the bucket
# takes at least `dp_size` times its largest parameter. It stays open until its
# parameters fill this fraction of that minimum; the rest would be padding.
_MIN_FILL = 0.9
# Limit on a shard's elements, as a multiple of an even share of the bucket. A larger
# shard may balance the work better, but its excess is padding in every other shard.
_MAX_SHARE = 1.3


def layer_wise_layout(
    params: Sequence[ParamSpec],
    dp_size: int,
    bucket_size: int | None = None,
    *,
    high_busbw: bool = False,
) -> BufferLayout:
    """Computes a buffer layout in which no parameter crosses a shard boundary.

    Each bucket holds consecutive parameters in the order of the backward pass. Within a
    bucket, parameters are assigned from the most to the least expensive. Each goes to
    the shard with the least accumulated work, over this bucket and all earlier ones,
    among the shards with room for it, or to the shortest shard if none has room.

    A shared embedding gets its own bucket, is placed in shard 0, and counts as no work
    because Adam updates it.

    Args:
      params: Parameters of one buffer, in model order.
      dp_size: Number of ranks that share one optimizer.
      bucket_size: Minimum size in elements at which a bucket may close. It closes when
        the next parameter no longer fits into its padding, and only after 0.9 of the
        size implied by its largest parameter is filled. None for a single bucket.
      high_busbw: Whether bucket ends are padded for NCCL; see `bucket_end_divisor`.

    Returns:
      Layout with `dp_size` shards and `whole_params` set.

    Raises:
      ValueError: If two parameters share a name, or a size is not positive.

    Source: Megatron-LM megatron/core/optimizer/layer_wise_optimizer.py
    ::LayerWiseDistributedOptimizer._compute_per_buffer_param_layout as of August 2026;
    earlier versions balance elements. The mode `use_layer_wise_param_layout=False`,
    which assigns complete parameters to ranks without a layout, is not implemented.
    """
    check(params, bucket_size, [dp_size])
    divisor = shard_divisor(dp_size, high_busbw)
    work = [0] * dp_size
    placements: list[Placement] = []
    buckets: list[Bucket] = []
    for chunk in _chunks(params, dp_size, bucket_size, divisor):
        if chunk[0].shared_embedding:
            shards = [chunk, *([] for _ in range(dp_size - 1))]
        else:
            shards = _balance(chunk, work)
            for number, shard in enumerate(shards):
                work[number] += sum(map(newton_schulz_cost, shard))
        size = pad_to_divisor(max(map(_length, shards)), divisor)
        start = buckets[-1].stop if buckets else 0
        for number, shard in enumerate(shards):
            placements += _place(shard, start + number * size, len(buckets))
        num_unpadded = sum(param.num_elements for param in chunk)
        buckets.append(Bucket(start, start + dp_size * size, num_unpadded))
    return BufferLayout(
        tuple(placements),
        tuple(buckets),
        num_shards=dp_size,
        start_divisor=PARAM_START_DIVISOR,
        end_divisor=bucket_end_divisor(dp_size, high_busbw),
        whole_params=True,
    )


def shard_divisor(dp_size: int, high_busbw: bool = False) -> int:
    """Returns the alignment of a layer-wise shard's size, in elements.

    With this alignment every shard starts at a multiple of 64, and `dp_size` shards end
    at a valid bucket end.

    Args:
      dp_size: Number of shards per bucket.
      high_busbw: Whether bucket ends are padded for NCCL; see `bucket_end_divisor`.

    Source: Megatron-LM megatron/core/optimizer/layer_wise_optimizer.py
    ::LayerWiseDistributedOptimizer._shard_divisor
    """
    bucket = bucket_end_divisor(dp_size, high_busbw)
    return math.lcm(PARAM_START_DIVISOR, bucket // dp_size)


def newton_schulz_cost(param: ParamSpec) -> int:
    """Returns the cost of Muon's update of a parameter, in arbitrary units.

    For a matrix the cost is the longer dim times the square of the shorter dim, with
    dim 0 gathered over `gtp_size` ranks. For any other parameter it is the number of
    elements.

    Source: Megatron-LM megatron/core/optimizer/layer_wise_optimizer.py
    ::_ns_compute_cost
    """
    if len(param.shape) != 2:
        return param.num_elements
    short, long = sorted((param.shape[0] * param.gtp_size, param.shape[1]))
    return long * short**2


def _chunks(
    params: Sequence[ParamSpec], dp_size: int, bucket_size: int | None, divisor: int
) -> Iterator[list[ParamSpec]]:
    """Yields the parameters of each bucket, from the model's last to its first."""
    chunk: list[ParamSpec] = []
    # Estimated end of each shard: parameters are added in backward order here, but
    # `_balance` sorts them by cost. A parameter that seems to fit can therefore still
    # enlarge the bucket; Megatron makes the same estimate.
    ends = [0] * dp_size
    for param in reversed(params):
        # A shared embedding closes the bucket before it and its own bucket.
        alone = param.shared_embedding or (chunk and chunk[-1].shared_embedding)
        full = bucket_size is not None and _is_full(chunk, dp_size, bucket_size)
        room = pad_to_divisor(max(ends), divisor)
        fits = pad_param_start(min(ends)) + param.num_elements <= room
        if chunk and (alone or (full and not fits)):
            yield chunk
            chunk, ends = [], [0] * dp_size
        shortest = ends.index(min(ends))
        ends[shortest] = pad_param_start(ends[shortest]) + param.num_elements
        chunk.append(param)
    if chunk:
        yield chunk


def _is_full(chunk: list[ParamSpec], dp_size: int, bucket_size: int) -> bool:
    sizes = [param.num_elements for param in chunk]
    # Use floats, here and in `_balance`, as Megatron does: exact fractions would differ
    # where a product is close to an integer.
    floor = int(dp_size * max(sizes, default=0) * _MIN_FILL)
    return sum(sizes) >= max(bucket_size, floor)


def _balance(chunk: list[ParamSpec], work: Sequence[int]) -> list[list[ParamSpec]]:
    """Assigns one bucket's parameters to shards, given each shard's work so far."""
    numbers = range(len(work))
    work = [*work]
    shards: list[list[ParamSpec]] = [[] for _ in numbers]
    ends = [0 for _ in numbers]
    limit = sum(param.num_elements for param in chunk) / len(work) * _MAX_SHARE
    for param in sorted(chunk, key=newton_schulz_cost, reverse=True):  # stable
        after = [pad_param_start(end) + param.num_elements for end in ends]
        roomy = [number for number in numbers if after[number] <= limit]
        if roomy:
            chosen = min(roomy, key=lambda number: work[number])
        else:  # no shard has room: take the shortest, so that padding stays small
            chosen = ends.index(min(ends))
        shards[chosen].append(param)
        ends[chosen] = after[chosen]
        work[chosen] += newton_schulz_cost(param)
    return shards


def _place(shard: list[ParamSpec], start: int, bucket: int) -> Iterator[Placement]:
    end = start
    for param in shard:
        begin = pad_param_start(end)
        end = begin + param.num_elements
        yield Placement(param, begin, end, bucket)


def _length(shard: list[ParamSpec]) -> int:
    return max((place.stop for place in _place(shard, 0, 0)), default=0)
