"""Padding: the multiples at which Megatron starts parameters and ends buckets."""

import math

PARAM_START_DIVISOR = 64
_BUCKET_END_DIVISOR = 128
_HIGH_BUSBW_DIVISOR = 2**16


def pad_to_divisor(value: int, divisor: int) -> int:
    """Rounds a position up to a multiple.

    By integers alone: Megatron divides floats, which lose elements beyond 2**53.

    Args:
      value: A position or a size, in elements.
      divisor: What the result is a multiple of.

    Source: Megatron-LM megatron/core/optimizer/param_layout.py::pad_to_divisor
    """
    return -(-value // divisor) * divisor


def pad_param_start(position: int) -> int:
    """Rounds a position up to where a parameter may start: a multiple of 64 elements.

    So a parameter of two bytes an element starts at a multiple of 128 bytes, as the
    wide loads of GPU kernels want it.

    Source: Megatron-LM megatron/core/optimizer/param_layout.py::pad_param_start
    """
    return pad_to_divisor(position, PARAM_START_DIVISOR)


def bucket_end_divisor(dp_size: int, high_busbw: bool = False) -> int:
    """Returns what the end of a bucket must be a multiple of.

    Of `dp_size`, so that every rank has a shard of the same size; of 128 for kernels;
    and, where asked, of 2**16, which NCCL's ring wants for its full bandwidth.

    Args:
      dp_size: Data ranks over which the buffer is sharded.
      high_busbw: Whether the run set `pad_buckets_for_high_nccl_busbw`.

    Source: Megatron-LM megatron/core/optimizer/param_layout.py::bucket_end_divisor
    """
    divisor = math.lcm(dp_size, _BUCKET_END_DIVISOR)
    return math.lcm(divisor, _HIGH_BUSBW_DIVISOR) if high_busbw else divisor


def pad_bucket_end(position: int, dp_size: int, high_busbw: bool = False) -> int:
    """Rounds a position up to where a bucket may end; see `bucket_end_divisor`.

    Source: Megatron-LM megatron/core/optimizer/param_layout.py::pad_bucket_end
    """
    return pad_to_divisor(position, bucket_end_divisor(dp_size, high_busbw))
