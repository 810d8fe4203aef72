"""The layer-wise layout: each matrix whole on one rank, and the work shared evenly.

Muon's Newton-Schulz iteration needs all of a matrix. So shards are packed with whole
parameters, and padded to the fullest among them.
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

# A bucket is as long as `dp_size` times its largest parameter, at least: it stays open
# until its own elements are this part of that, or the rest would be padding.
_MIN_FILL = 0.9
# A shard takes up to this many times its even part of a bucket's elements for the
# sake of even work: what it takes beyond is padding in all others.
_MAX_SHARE = 1.3


def layer_wise_layout(
    params: Sequence[ParamSpec],
    dp_size: int,
    bucket_size: int | None = None,
    *,
    high_busbw: bool = False,
) -> BufferLayout:
    """Lays a buffer out so that no parameter crosses a shard.

    Buckets are runs of parameters in backward's order. Within one the most expensive
    parameter goes first, to the shard with the least work so far, in this bucket and
    all before it, among those with room for it.

    A shared embedding has a bucket to itself, lies in shard 0, and is no work: Adam
    updates it.

    Args:
      params: Parameters of one buffer, in the order of the model.
      dp_size: Ranks in the group that shares one optimizer.
      bucket_size: Elements from which on a bucket may close. It does so once the next
        parameter would no longer fit into its padding, and not before 0.9 of what its
        largest parameter makes it take is filled. None for a single bucket.
      high_busbw: As in `bucket_end_divisor`.

    Raises:
      ValueError: If a name is given twice, or a size is not positive.

    Source: Megatron-LM megatron/core/optimizer/layer_wise_optimizer.py
    ::LayerWiseDistributedOptimizer._compute_per_buffer_param_layout as of August 2026;
    earlier ones pack by elements. Its other mode, `use_layer_wise_param_layout=False`,
    which deals whole parameters out to ranks without a layout, is not mirrored.
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
    """Returns what the size of a shard must be a multiple of.

    Then every shard starts at a multiple of 64, and `dp_size` of them end where a
    bucket may.

    Args:
      dp_size: Shards a bucket.
      high_busbw: As in `bucket_end_divisor`.

    Source: Megatron-LM megatron/core/optimizer/layer_wise_optimizer.py
    ::LayerWiseDistributedOptimizer._shard_divisor
    """
    bucket = bucket_end_divisor(dp_size, high_busbw)
    return math.lcm(PARAM_START_DIVISOR, bucket // dp_size)


def newton_schulz_cost(param: ParamSpec) -> int:
    """Returns how much work Muon has with a parameter, in arbitrary units.

    Its products of matrices cost the longer dim times the shorter one squared, on the
    matrix as it is once dim 0 is gathered. What is not a matrix counts its elements.

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
    """Cuts the parameters, last first, into those of each bucket."""
    chunk: list[ParamSpec] = []
    # An estimate: filled in backward's order, where `_balance` sorts. So it may let a
    # parameter in that makes the bucket grow after all; Megatron's does the same.
    ends = [0] * dp_size
    for param in reversed(params):
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
    # Floats, here and below, for they are Megatron's: exact fractions would differ
    # where a product is nearly whole.
    floor = int(dp_size * max(sizes, default=0) * _MIN_FILL)
    return sum(sizes) >= max(bucket_size, floor)


def _balance(chunk: list[ParamSpec], work: Sequence[int]) -> list[list[ParamSpec]]:
    """Deals the parameters of one bucket out to shards, given their work so far."""
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
        else:
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
