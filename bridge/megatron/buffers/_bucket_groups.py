"""Bucket groups: sets of buckets, from several buffers, communicated together."""

from collections.abc import Sequence
from typing import NamedTuple

from bridge.megatron.buffers._full_layout import Buffer


class BucketId(NamedTuple):
    """Bucket identified by buffer index and by bucket index within that buffer."""

    buffer: int
    bucket: int


def partition_buckets(
    buffers: Sequence[Buffer],
    *,
    single_group: bool = False,
    fp32_reduce_scatter: bool = False,
) -> tuple[tuple[BucketId, ...], ...]:
    """Groups the buckets of several buffers for communication.

    Each bucket forms its own group, except in a model with a quantized buffer and a few
    plain parameters. Plain parameters are spread over the whole model, so their bucket
    is complete only when the backward pass ends. They join the last bucket of the
    quantized buffer, which completes at the same time; this saves one collective
    launch.

    Args:
      buffers: Buffers reduced over one process group: all dense or all expert buffers.
      single_group: Whether to put all buckets into one group.
      fp32_reduce_scatter: Whether the run uses a reduce-scatter with float32
        accumulation. It takes one bucket at a time, so plain buckets form their own
        groups, after the quantized ones.

    Returns:
      Bucket groups, in the order in which the backward pass completes them.

    Raises:
      ValueError: If several buffers are quantized, if a group would join buckets that
        are reduced over different ranks, or if `fp32_reduce_scatter` forbids the group.
        (Megatron reports the last case only in the first training step.)

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
