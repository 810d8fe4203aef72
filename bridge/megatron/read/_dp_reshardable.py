"""Optimizer state in flat buckets (`dp_reshardable`), split into weights.

This is Megatron's default: each data-parallel rank saves its shards as they are in
memory, so the files hold the buckets of every model-parallel rank without parameter
names. Each parameter, and each gap between two, is a separate chunk, and the length of
a bucket is recorded. The parameters, in the order in which the model registers them,
must therefore end at chunk and bucket ends; this module checks that from metadata. In
addition, every read of a moment checks that the master weights beside it round to the
model's weights; otherwise the moment belongs to another weight.

Source: Megatron-LM megatron/core/optimizer/distrib_optimizer.py
::DistributedOptimizer.sharded_param_state_dp_reshardable
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bridge.megatron._pipeline import Pipeline
from bridge.megatron._rank_buffers import even_pipeline, local_shape, rank_buffers
from bridge.megatron._views import Assembled, Tensor, Unflattened
from bridge.megatron.buffers._padding import pad_param_start
from bridge.megatron.read._buffer_parts import KINDS, Parts, merge_parts
from bridge.megatron.read._verified import verify_states

_KEY = re.compile(
    r"^(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)"
    r"\.gbuf_idx_(\d+)\.dtype_.+\.bucket_idx_(\d+)\.(param|exp_avg|exp_avg_sq)$"
)

Buckets = list[dict[str, Assembled]]
"""Buckets of one buffer; each bucket has three flat tensors, keyed by kind."""


def is_bucket_key(key: str) -> bool:
    """Returns whether a key of a distributed checkpoint names a flat bucket."""
    return _KEY.match(key) is not None


def read_buckets(
    tensors: Mapping[str, Assembled],
    model: Mapping[str, Tensor],
    args: Mapping[str, Any],
) -> dict[str, dict[str, Tensor]]:
    """Returns each weight's master weight and moments from flat buckets.

    Args:
      tensors: Flat buckets by key on disk.
      model: Tensors of the model by canonical name.
      args: Settings of the run.

    Returns:
      Tensors by canonical name for each of `"master"`, `"exp_avg"`, `"exp_avg_sq"`.
      Each read verifies that the state belongs to its weight.

    Raises:
      ValueError: If the buckets do not match the model that `args` describe, or `args`
        describe an uneven pipeline.
    """
    pipeline = even_pipeline(args)
    buffers = _buffers(tensors)
    parts: Parts = {}
    for of in rank_buffers(model, args, pipeline):
        buckets = buffers.pop((int(of.is_expert), of.group, of.chunk), None)
        if buckets is None:
            raise ValueError(f"model-parallel rank {of.group} has no buffer {of.chunk}")
        for name, found in _take_apart(buckets, of.names, model, args, pipeline):
            parts.setdefault(name, {})[of.group, of.rank.tp] = found
    if buffers:
        raise ValueError(f"no parameters are known for {len(buffers)} buffers")
    return verify_states(merge_parts(parts, args, pipeline), model)


def _buffers(tensors: Mapping[str, Assembled]) -> dict[tuple[int, int, int], Buckets]:
    """Groups buckets by optimizer (0 dense, 1 experts), rank and buffer index."""
    found: dict[tuple[int, int, int], dict[int, dict[str, Assembled]]] = {}
    for key, tensor in tensors.items():
        match = _KEY.match(key)
        assert match is not None  # the caller's choice of keys
        chain, group, buffer, bucket = (int(n or 0) for n in match.groups()[:4])
        of_buffer = found.setdefault((chain, group, buffer), {})
        of_buffer.setdefault(bucket, {})[match[5]] = tensor
    for key, of_buffer in found.items():
        if set(of_buffer) != set(range(len(of_buffer))) or any(
            set(bucket) != set(KINDS) for bucket in of_buffer.values()
        ):
            raise ValueError(f"buckets of the buffer {key} are missing")
    return {key: [of[n] for n in range(len(of))] for key, of in found.items()}


def _take_apart(
    buckets: Buckets,
    names: Sequence[str],
    model: Mapping[str, Tensor],
    args: Mapping[str, Any],
    pipeline: Pipeline,
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yields each weight's part of a buffer, in buffer order (last weight first)."""
    left = list(names)  # consumed from the end: buffers are in reverse model order
    for bucket in buckets:
        (length,) = bucket["param"].shape
        # Parameters and gaps are separate chunks, so each parameter starts and ends at
        # a chunk boundary. Positions restart at 0 in each bucket.
        ends = {tile.box[0].stop for tile in bucket["param"].tiles} | {0}
        stop = 0
        # A bucket that closes before a shared embedding ends at an aligned position.
        while pad_param_start(stop) < length:
            if not left:
                raise ValueError("a buffer is longer than its parameters")
            name = left.pop()
            shape = local_shape(name, model[name].shape, args, pipeline)
            start = pad_param_start(stop)
            stop = start + math.prod(shape)
            if not {start, stop} <= ends:
                raise ValueError(f"'{name}' does not begin and end where chunks do")
            yield (
                name,
                {
                    kind: Unflattened(flat, start, shape)
                    for kind, flat in bucket.items()
                },
            )
        if length not in (stop, pad_param_start(stop)):
            raise ValueError(f"parameters end at {stop:,}, their bucket at {length:,}")
    if left:
        raise ValueError(f"a buffer is too short for {left}")
