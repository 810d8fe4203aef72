"""The full layout: every buffer of a model, each laid out for its own optimizer."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from bridge.megatron.buffers._buffer_layout import BufferLayout, check
from bridge.megatron.buffers._layer_wise_layout import layer_wise_layout
from bridge.megatron.buffers._param_groups import BufferKey, ParamGroup, group_params
from bridge.megatron.buffers._param_spec import ParamSpec
from bridge.megatron.buffers._sequential_layout import (
    default_layout,
    distributed_optimizer_layout,
)

_MIN_BUCKET_SIZE = 40_000_000
_BUCKET_SIZE_PER_RANK = 1_000_000


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One buffer of a model.

    Args:
      key: What its parameters have in common.
      group: Its parameters.
      layout: Where they lie; each buffer counts from 0.
    """

    key: BufferKey
    group: ParamGroup
    layout: BufferLayout


def full_layout(
    params: Sequence[ParamSpec],
    *,
    dp_size: int,
    expert_dp_size: int | None = None,
    bucket_size: int | None = None,
    optimizer: Literal["replicated", "distributed", "layer_wise"] = "distributed",
    grad_reduce_in_fp32: bool = False,
    high_busbw: bool = False,
) -> tuple[Buffer, ...]:
    """Groups the parameters of a model into buffers, and lays each of them out.

    Args:
      params: Trainable parameters of the model, in its order.
      dp_size: Ranks in the group that shares one optimizer, for dense parameters.
      expert_dp_size: The same for experts; None for as many as `dp_size`.
      bucket_size: Elements a bucket, as in the layout functions; None for one bucket.
        `resolve_bucket_size` says what a training run takes.
      optimizer: `"replicated"`, whole on each rank; `"distributed"`, its state split;
        `"layer_wise"`, Muon for matrices, and `"distributed"` for all else.
      grad_reduce_in_fp32: As in `group_params`.
      high_busbw: As in `bucket_end_divisor`.

    Returns:
      The buffers, in the order in which the model first needs each.

    Raises:
      ValueError: If a name is given twice, or a size is not positive.

    Source: Megatron-LM megatron/core/optimizer/distrib_optimizer.py
    ::DistributedOptimizer.compute_full_param_layout and
    megatron/core/optimizer/layer_wise_optimizer.py
    ::LayerWiseDistributedOptimizer.compute_full_param_layout
    """
    expert_dp_size = dp_size if expert_dp_size is None else expert_dp_size
    check(params, bucket_size, [dp_size, expert_dp_size])
    groups = group_params(
        params,
        grad_reduce_in_fp32=grad_reduce_in_fp32,
        layer_wise=optimizer == "layer_wise",
    )

    def lay_out(key: BufferKey, params: Sequence[ParamSpec]) -> BufferLayout:
        if optimizer == "replicated":
            return default_layout(params, bucket_size)
        of_key = (
            layer_wise_layout if key.is_layer_wise else distributed_optimizer_layout
        )
        size = expert_dp_size if key.is_expert else dp_size
        return of_key(params, size, bucket_size, high_busbw=high_busbw)

    return tuple(
        Buffer(key, group, lay_out(key, group.params)) for key, group in groups.items()
    )


def resolve_bucket_size(
    requested: int | None,
    dp_size: int,
    *,
    overlap_grad_reduce: bool = True,
    pipeline_rank: int = 0,
    disable_bucketing: bool = False,
) -> int | None:
    """Returns the bucket size that a training run takes, given its settings.

    Several buckets are there to reduce the first while backward makes the next. So
    one will do without that overlap, and on all pipeline stages but the first: they
    end backward earlier, and would only wait for it.

    Args:
      requested: The run's `bucket_size`, in elements; None for Megatron's default:
        the larger of 40 million and one million a data rank, for a ring of more ranks
        needs larger messages.
      dp_size: Data ranks, those of context parallelism included.
      overlap_grad_reduce: The run's setting of this name.
      pipeline_rank: Pipeline stage that holds the model chunk.
      disable_bucketing: True, in Megatron, for all of a stage's chunks but its first.

    Returns:
      Elements, or None for a single bucket.

    Source: Megatron-LM megatron/core/distributed/distributed_data_parallel.py
    ::DistributedDataParallel.__init__, which also writes the default into the config
    that it was given; ours is left alone.
    """
    if not overlap_grad_reduce or pipeline_rank > 0 or disable_bucketing:
        return None
    if requested is None:
        return max(_MIN_BUCKET_SIZE, _BUCKET_SIZE_PER_RANK * dp_size)
    return requested
