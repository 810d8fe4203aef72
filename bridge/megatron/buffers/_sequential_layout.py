"""Sequential layouts: parameters back to back, in reverse model order.

The backward pass computes gradients in approximately this order, so a bucket is
complete, and its reduction can start, while earlier layers are still running.
"""

import dataclasses
from collections.abc import Sequence

from bridge.megatron.buffers._buffer_layout import (
    Bucket,
    BufferLayout,
    Placement,
    check,
)
from bridge.megatron.buffers._padding import (
    PARAM_START_DIVISOR,
    bucket_end_divisor,
    pad_to_divisor,
)
from bridge.megatron.buffers._param_spec import ParamSpec


def default_layout(
    params: Sequence[ParamSpec], bucket_size: int | None = None
) -> BufferLayout:
    """Computes the layout of a buffer for a replicated optimizer, without padding.

    Args:
      params: Parameters of one buffer, in model order.
      bucket_size: Size in elements at which a bucket closes; it includes the parameter
        that reaches this size. None for a single bucket.

    Returns:
      Layout without shards (`num_shards` is None).

    Raises:
      ValueError: If two parameters share a name, or `bucket_size` is not positive.

    Source: Megatron-LM megatron/core/distributed/param_and_grad_buffer.py
    ::_compute_default_per_buffer_param_layout
    """
    check(params, bucket_size)
    return _lay_out(params, bucket_size, BufferLayout((), (), None, 1, 1))


def distributed_optimizer_layout(
    params: Sequence[ParamSpec],
    dp_size: int,
    bucket_size: int | None = None,
    *,
    high_busbw: bool = False,
) -> BufferLayout:
    """Computes the layout of a buffer whose optimizer state is split over data ranks.

    Parameters start at multiples of 64, and buckets end at multiples of
    `bucket_end_divisor`. Shard boundaries ignore parameter boundaries, so a shard may
    start inside a matrix.

    A shared embedding gets its own bucket. Both pipeline stages that hold it then split
    it into the same shards and can add their gradient shards.

    Args:
      params: Parameters of one buffer, in model order.
      dp_size: Number of ranks that share one optimizer. With several optimizer
        instances this is smaller than the number of data-parallel ranks.
      bucket_size: Size in elements at which a bucket closes, as in `default_layout`;
        gaps between parameters count. None for a single bucket.
      high_busbw: Whether bucket ends are padded for NCCL; see `bucket_end_divisor`.

    Returns:
      Layout with `dp_size` shards.

    Raises:
      ValueError: If two parameters share a name, or a size is not positive.

    Source: Megatron-LM megatron/core/optimizer/distrib_optimizer.py
    ::DistributedOptimizer._compute_per_buffer_param_layout
    """
    check(params, bucket_size, [dp_size])
    divisor = bucket_end_divisor(dp_size, high_busbw)
    empty = BufferLayout((), (), dp_size, PARAM_START_DIVISOR, divisor)
    return _lay_out(params, bucket_size, empty)


def packed_layout(layout: BufferLayout) -> BufferLayout:
    """Returns the layout of a parameter buffer that stores NVFP4 values packed.

    NVFP4 stores two values per byte, while every value has its own gradient. The
    gradient buffer uses `layout` and the parameter buffer uses the packed layout: it
    has the same buckets, but an NVFP4 parameter takes half as many elements.

    Args:
      layout: Sequential layout of the same buffer.

    Returns:
      Packed layout; equal to `layout` if no parameter is stored as NVFP4.

    Raises:
      ValueError: If an NVFP4 parameter has an odd number of elements, or if the layout
        is layer-wise. Layer-wise shards have no packed form; Megatron packs them in
        order and would split matrices across shards.

    Source: Megatron-LM megatron/core/distributed/param_and_grad_buffer.py
    ::_ParamAndGradBuffer._compute_nvfp4_packed_layout
    """
    _check_packable(layout)
    writer = _Writer(layout)
    for placement in layout.placements:
        if placement.bucket > len(writer.buckets):
            writer.close(writer.next_start)
        writer.place(placement.param, _packed_size(placement.param))
    return writer.finish()


def _lay_out(
    params: Sequence[ParamSpec], bucket_size: int | None, empty: BufferLayout
) -> BufferLayout:
    writer = _Writer(empty)
    for param in reversed(params):
        # A shared embedding needs its own bucket only so that both pipeline stages
        # shard it identically; a layout without shards does not need that.
        alone = param.shared_embedding and empty.num_shards is not None
        if alone and writer.is_open:
            # `num_unpadded` counts up to the next aligned start, not up to the last
            # parameter's end, as in Megatron.
            writer.close(writer.next_start)
        writer.place(param, param.num_elements)
        full = bucket_size is not None and writer.end - writer.start >= bucket_size
        if alone or full:
            writer.close(writer.end)
    return writer.finish()


class _Writer:
    """Builder of a sequential layout: places parameters and closes buckets in order."""

    def __init__(self, rules: BufferLayout):
        self.rules = rules
        self.placements: list[Placement] = []
        self.buckets: list[Bucket] = []
        # Start of the open bucket, and end of the parameter placed last.
        self.start = self.end = 0

    @property
    def is_open(self) -> bool:
        return bool(self.placements) and self.placements[-1].bucket == len(self.buckets)

    @property
    def next_start(self) -> int:
        return pad_to_divisor(self.end, self.rules.start_divisor)

    def place(self, param: ParamSpec, size: int) -> None:
        start = self.next_start
        self.end = start + size
        self.placements.append(Placement(param, start, self.end, len(self.buckets)))

    def close(self, end: int) -> None:
        stop = pad_to_divisor(end, self.rules.end_divisor)
        self.buckets.append(Bucket(self.start, stop, end - self.start))
        self.start = self.end = stop

    def finish(self) -> BufferLayout:
        if self.is_open:
            self.close(self.end)
        return dataclasses.replace(
            self.rules, placements=tuple(self.placements), buckets=tuple(self.buckets)
        )


def _packed_size(param: ParamSpec) -> int:
    return param.num_elements // (2 if param.storage == "nvfp4" else 1)


def _check_packable(layout: BufferLayout) -> None:
    if layout.whole_params:
        raise ValueError(
            f"Cannot pack a layer-wise layout of {len(layout.placements)} parameters: "
            "packed in order, they would cross shards. Keep the parameters of a "
            "layer-wise optimizer out of NVFP4."
        )
    odd = [
        f"{place.param.name!r} of shape {place.param.shape}"
        for place in layout.placements
        if place.param.storage == "nvfp4" and place.param.num_elements % 2
    ]
    if odd:
        raise ValueError(
            f"Cannot pack two values a byte: {', '.join(odd)} have an odd number of "
            "elements. Store them as plain, or pad one of their dims."
        )
