"""Full layout: all buffers of a model, each laid out for the optimizer it uses."""

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
    """Buffer of a model: its key, its parameters and their layout.

    Args:
      key: Properties shared by all parameters of the buffer.
      group: Parameters of the buffer.
      layout: Layout of the parameters; positions start at 0 in each buffer.
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
    """Groups the parameters of a model into buffers and computes each layout.

    Args:
      params: Trainable parameters, in model order.
      dp_size: Number of ranks that share one optimizer for dense parameters.
      expert_dp_size: Number of ranks that share one optimizer for expert parameters;
        None for `dp_size`.
      bucket_size: Bucket size in elements, as in the layout functions; None for a
        single bucket. `resolve_bucket_size` returns the value that a training run uses.
      optimizer: `"replicated"` keeps the full state on each rank, `"distributed"`
        splits it over data-parallel ranks, `"layer_wise"` uses Muon for matrices and
        `"distributed"` for all other parameters.
      grad_reduce_in_fp32: Whether gradients are float32; see `group_params`.
      high_busbw: Whether bucket ends are padded for NCCL; see `bucket_end_divisor`.

    Returns:
      Buffers, in the order in which a parameter of each first appears in `params`.

    Raises:
      ValueError: If two parameters share a name, or a size is not positive.

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
    """Returns the bucket size that a training run uses, given its settings.

    Several buckets allow one to be reduced while the backward pass computes the next.
    A single bucket therefore suffices without that overlap, and on every pipeline stage
    except the first: later stages finish their backward pass earlier and would only
    wait for the first.

    Args:
      requested: The run's `bucket_size`, in elements. None selects Megatron's default,
        max(40 million, 1 million * `dp_size`), because a ring of more ranks needs
        larger messages.
      dp_size: Number of data-parallel ranks, including context-parallel ranks.
      overlap_grad_reduce: The run's `overlap_grad_reduce`.
      pipeline_rank: Index of the pipeline stage that holds the model chunk.
      disable_bucketing: Whether to force a single bucket. Megatron sets it for every
        chunk of a stage except the first.

    Returns:
      Bucket size in elements, or None for a single bucket.

    Source: Megatron-LM megatron/core/distributed/distributed_data_parallel.py
    ::DistributedDataParallel.__init__. Deviation: Megatron also writes the default into
    the config that it was given; this function modifies nothing.
    """
    if not overlap_grad_reduce or pipeline_rank > 0 or disable_bucketing:
        return None
    if requested is None:
        return max(_MIN_BUCKET_SIZE, _BUCKET_SIZE_PER_RANK * dp_size)
    return requested
