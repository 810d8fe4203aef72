"""Layout of a rank's buffer, as the settings of its run determine it."""

from collections.abc import Mapping
from typing import Any

from bridge.megatron._pipeline import Pipeline
from bridge.megatron._rank_buffers import RankBuffer, local_shape
from bridge.megatron.buffers._buffer_layout import BufferLayout
from bridge.megatron.buffers._full_layout import resolve_bucket_size
from bridge.megatron.buffers._param_spec import ParamSpec
from bridge.megatron.buffers._sequential_layout import distributed_optimizer_layout


def rank_layout(
    buffer: RankBuffer,
    shapes: Mapping[str, tuple[int, ...]],
    args: Mapping[str, Any],
    pipeline: Pipeline,
) -> BufferLayout:
    """Computes the layout of one rank's buffer.

    Args:
      buffer: Buffer of a model-parallel rank.
      shapes: Unsharded shapes of the model's tensors by canonical name, with the
        vocabulary padded.
      args: Settings of the run: `data_parallel_size`, `context_parallel_size`,
        `ddp_bucket_size`, `overlap_grad_reduce` and others. What is missing has
        Megatron's default; the data-parallel size then is the expert-parallel size.
      pipeline: Distribution of layers and experts over ranks.

    Raises:
      ValueError: If the data-parallel ranks are not a multiple of the expert-parallel
        ranks, or of the optimizer's instances.

    Source: Megatron-LM megatron/training/training.py::get_model
    """
    sizes = _data_parallel_sizes(args, pipeline)
    bucket_size = resolve_bucket_size(
        args.get("ddp_bucket_size"),
        sizes[False],
        overlap_grad_reduce=bool(args.get("overlap_grad_reduce")),
        pipeline_rank=buffer.rank.pp,
        disable_bucketing=buffer.chunk > 0,
    )
    specs = [
        ParamSpec(
            name,
            local_shape(name, shapes[name], args, pipeline),
            is_expert=buffer.is_expert,
            shared_embedding=name == buffer.shared,
        )
        for name in buffer.names
    ]
    return distributed_optimizer_layout(
        specs,
        _optimizer_ranks(sizes[buffer.is_expert], args),
        bucket_size,
        high_busbw=bool(args.get("ddp_pad_buckets_for_high_nccl_busbw")),
    )


def _data_parallel_sizes(
    args: Mapping[str, Any], pipeline: Pipeline
) -> dict[bool, int]:
    """Returns the data-parallel ranks of dense weights (False) and experts (True)."""
    ep = pipeline.sizes.ep
    cp = args.get("context_parallel_size") or 1
    dp = (args.get("data_parallel_size") or max(ep // cp, 1)) * cp
    if dp % ep:
        raise ValueError(f"{dp} data-parallel ranks are not a multiple of EP {ep}")
    return {False: dp, True: dp // ep}


def _optimizer_ranks(dp: int, args: Mapping[str, Any]) -> int:
    instances = args.get("num_distributed_optimizer_instances") or 1
    if dp % instances:
        raise ValueError(f"{instances} optimizers do not divide {dp} ranks")
    return dp // instances
