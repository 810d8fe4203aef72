"""Padding: Megatron's alignment of parameter starts and bucket ends."""

import math

PARAM_START_DIVISOR = 64
_BUCKET_END_DIVISOR = 128
_HIGH_BUSBW_DIVISOR = 2**16


def pad_to_divisor(value: int, divisor: int) -> int:
    """Rounds a position up to a multiple of `divisor`.

    Args:
      value: Position or size, in elements.
      divisor: Alignment of the result, in elements.

    Source: Megatron-LM megatron/core/optimizer/param_layout.py::pad_to_divisor.
    Deviation: Megatron divides floats, which are inexact beyond 2**53; this function
    uses integers only.
    """
    return -(-value // divisor) * divisor


def pad_param_start(position: int) -> int:
    """Rounds a position up to a valid parameter start: a multiple of 64 elements.

    A parameter of two-byte elements then starts at a multiple of 128 bytes, the
    alignment that wide loads in GPU kernels require.

    Source: Megatron-LM megatron/core/optimizer/param_layout.py::pad_param_start
    """
    return pad_to_divisor(position, PARAM_START_DIVISOR)


def bucket_end_divisor(dp_size: int, high_busbw: bool = False) -> int:
    """Returns the alignment of a bucket's end, in elements.

    The end is a multiple of `dp_size`, so that all ranks have shards of equal size, of
    128 for GPU kernels, and, with `high_busbw`, of 2**16, with which NCCL's ring
    reaches its full bandwidth.

    Args:
      dp_size: Number of data-parallel ranks over which the buffer is sharded.
      high_busbw: Whether the run set `pad_buckets_for_high_nccl_busbw`.

    Source: Megatron-LM megatron/core/optimizer/param_layout.py::bucket_end_divisor
    """
    divisor = math.lcm(dp_size, _BUCKET_END_DIVISOR)
    return math.lcm(divisor, _HIGH_BUSBW_DIVISOR) if high_busbw else divisor


def pad_bucket_end(position: int, dp_size: int, high_busbw: bool = False) -> int:
    """Rounds a position up to a valid bucket end; see `bucket_end_divisor`.

    Source: Megatron-LM megatron/core/optimizer/param_layout.py::pad_bucket_end
    """
    return pad_to_divisor(position, bucket_end_divisor(dp_size, high_busbw))
