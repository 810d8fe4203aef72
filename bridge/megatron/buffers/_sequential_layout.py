"""Sequential layouts: parameters one after the other, the model's last one first.

Backward meets parameters in about that order, so a bucket is complete, and its
reduction can start, while earlier layers are still at work.
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
    """Lays a buffer out for an optimizer that every rank runs whole: no padding.

    Args:
      params: Parameters of one buffer, in the order of the model.
      bucket_size: Elements at which a bucket closes: the parameter that reaches it is
        still in. None for a single bucket.

    Raises:
      ValueError: If a name is given twice, or `bucket_size` is not positive.

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
    """Lays a buffer out for an optimizer whose state is split over data ranks.

    Parameters start at multiples of 64 and buckets end where `dp_size` shards are
    equal. Shards do not respect parameters: the next one begins mid-matrix.

    A shared embedding has a bucket to itself. Both pipeline stages that hold it then
    cut it into the same shards, and can add up their shards of its gradient.

    Args:
      params: Parameters of one buffer, in the order of the model.
      dp_size: Ranks in the group that shares one optimizer. With several optimizer
        instances that is a part of the data ranks, not all of them.
      bucket_size: As in `default_layout`; gaps between parameters count.
      high_busbw: As in `bucket_end_divisor`.

    Raises:
      ValueError: If a name is given twice, or a size is not positive.

    Source: Megatron-LM megatron/core/optimizer/distrib_optimizer.py
    ::DistributedOptimizer._compute_per_buffer_param_layout
    """
    check(params, bucket_size, [dp_size])
    divisor = bucket_end_divisor(dp_size, high_busbw)
    empty = BufferLayout((), (), dp_size, PARAM_START_DIVISOR, divisor)
    return _lay_out(params, bucket_size, empty)


def packed_layout(layout: BufferLayout) -> BufferLayout:
    """Returns where the bytes of NVFP4 parameters lie, given where gradients lie.

    NVFP4 stores two values a byte, and the gradient of each is a number of its own.
    So there are two maps with the same buckets: gradients by `layout`, and parameters
    by this one, in which an NVFP4 parameter takes half as many elements.

    Args:
      layout: A sequential layout of the same buffer.

    Returns:
      The packed layout; an equal one if no parameter is stored as NVFP4.

    Raises:
      ValueError: If an NVFP4 parameter has an odd number of elements, or the layout
        is layer-wise: its shards have no packed form, and Megatron, which packs it in
        order all the same, would cut matrices in two.

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
        # Without shards there is nothing to cut alike: the rule is off.
        alone = param.shared_embedding and empty.num_shards is not None
        if alone and writer.is_open:
            # Up to the next start, not to the last end: so Megatron counts.
            writer.close(writer.next_start)
        writer.place(param, param.num_elements)
        full = bucket_size is not None and writer.end - writer.start >= bucket_size
        if alone or full:
            writer.close(writer.end)
    return writer.finish()


class _Writer:
    """Walks along a buffer: places parameters, and closes buckets behind them."""

    def __init__(self, rules: BufferLayout):
        self.rules = rules
        self.placements: list[Placement] = []
        self.buckets: list[Bucket] = []
        self.start = self.end = 0  # of the open bucket; of what was placed last

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
