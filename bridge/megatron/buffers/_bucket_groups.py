"""Bucket groups: which buckets, of several buffers, are communicated together."""

from collections.abc import Sequence
from typing import NamedTuple

from bridge.megatron.buffers._full_layout import Buffer


class BucketId(NamedTuple):
    """A bucket of one among several buffers, by position."""

    buffer: int
    bucket: int


def partition_buckets(
    buffers: Sequence[Buffer],
    *,
    single_group: bool = False,
    fp32_reduce_scatter: bool = False,
) -> tuple[tuple[BucketId, ...], ...]:
    """Groups the buckets of buffers for communication.

    Each is alone, but for a model of quantized matrices with a few plain parameters:
    those lie all over the model, so their bucket is complete only when backward ends.
    They join the last bucket of the quantized buffer, which is complete then too, and
    save a launch.

    Args:
      buffers: Buffers of one process group: the dense ones, or those of experts.
      single_group: Puts all buckets into one group.
      fp32_reduce_scatter: Whether the run accumulates in float32 while it scatters,
        which takes one bucket at a time: plain buckets stay alone, after the others.

    Returns:
      The groups, in the order in which backward completes them.

    Raises:
      ValueError: If there are several quantized buffers, or buckets would be joined
        that do not share their ranks or that `fp32_reduce_scatter` needs alone. (For
        the last Megatron fails in the first step.)

    Source: Megatron-LM
    megatron/core/distributed/param_and_grad_buffer.py::partition_buckets
    """
    quantized: list[BucketId] = []
    plain: list[BucketId] = []
    for number, buffer in enumerate(buffers):
        ids = quantized if _is_quantized(buffer) else plain
        ids += [BucketId(number, i) for i in range(len(buffer.layout.buckets))]
    if single_group:
        groups = [sorted(quantized + plain)]
    elif quantized and not fp32_reduce_scatter:
        groups = [*([i] for i in quantized[:-1]), [quantized[-1], *plain]]
    else:
        groups = [[i] for i in quantized + plain]
    _check(buffers, groups, fp32_reduce_scatter)
    return tuple(tuple(group) for group in groups if group)


def _is_quantized(buffer: Buffer) -> bool:
    return buffer.key.param_dtype == "uint8"


def _check(
    buffers: Sequence[Buffer], groups: list[list[BucketId]], fp32_reduce_scatter: bool
) -> None:
    wrong = []
    num_quantized = sum(map(_is_quantized, buffers))
    if num_quantized > 1:
        wrong.append(
            f"{num_quantized} buffers are quantized, and plain buckets would not know "
            "which to join: partition the buffers of one optimizer at a time"
        )
    joined = [group for group in groups if len(group) > 1]
    if joined and fp32_reduce_scatter:
        wrong.append(
            f"{len(joined[0])} buckets would be one group, and a reduce-scatter with "
            "float32 accumulation takes one at a time: leave single_group off"
        )
    for group in joined:
        ranks = {
            (buffers[i.buffer].key.is_expert, buffers[i.buffer].layout.num_shards)
            for i in group
        }
        if len(ranks) > 1:
            wrong.append(
                "(is_expert, num_shards) of the buffers to join are "
                f"{sorted(ranks, key=str)}, so they are not reduced over the same "
                "ranks: partition dense and expert buffers apart"
            )
    if wrong:
        raise ValueError(f"Cannot group {len(buffers)} buffers: {'; '.join(wrong)}.")
