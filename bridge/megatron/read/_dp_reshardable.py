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

from bridge.megatron._key_mapping import in_module
from bridge.megatron._names import EMBEDDING, HEAD
from bridge.megatron._pipeline import Pipeline
from bridge.megatron._ranks import ParallelSizes
from bridge.megatron._tensor_parallel import (
    Split,
    is_gated,
    merge,
    split_of,
    split_shape,
)
from bridge.megatron._views import Assembled, Replicated, Tensor, Unflattened
from bridge.megatron.buffers._padding import pad_param_start
from bridge.megatron.buffers._param_order import is_parameter, order_in_module
from bridge.megatron.read._verified import verify_states

_KEY = re.compile(
    r"^(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)"
    r"\.gbuf_idx_(\d+)\.dtype_.+\.bucket_idx_(\d+)\.(param|exp_avg|exp_avg_sq)$"
)
KINDS = {"param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}

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
    pipeline = _pipeline(args)
    buffers = _buffers(tensors)
    parts: dict[str, dict[tuple[int, int], dict[str, Tensor]]] = {}
    for tp, chain, group, chunk, names in _groups(model, args, pipeline):
        buckets = buffers.pop((chain, group, chunk), None)
        if buckets is None:
            raise ValueError(f"model-parallel rank {group} has no buffer {chunk}")
        for name, found in _take_apart(buckets, names, model, args, pipeline):
            parts.setdefault(name, {})[group, tp] = found
    if buffers:
        raise ValueError(f"no parameters are known for {len(buffers)} buffers")
    states = {kind: _merge(parts, kind, args, pipeline) for kind in KINDS}
    named = {KINDS[kind]: state for kind, state in states.items()}
    return verify_states(named, model)


def _pipeline(args: Mapping[str, Any]) -> Pipeline:
    uneven = [
        name
        for name in (
            "decoder_first_pipeline_num_layers",
            "decoder_last_pipeline_num_layers",
            "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split",
            "pipeline_model_parallel_layout",
            "num_layers_per_virtual_pipeline_stage",
            "mtp_num_layers",
        )
        if args.get(name)
    ]
    names = ("tensor", "pipeline", "expert")
    sizes = ParallelSizes(*(args.get(f"{n}_model_parallel_size") or 1 for n in names))
    if args.get("num_experts") and sizes.tp != (
        args.get("expert_tensor_parallel_size") or sizes.tp
    ):
        uneven.append("expert_tensor_parallel_size")
    num_chunks = args.get("virtual_pipeline_model_parallel_size") or 1
    num_layers = args.get("num_layers") or 0
    if uneven or not num_layers or num_layers % (sizes.pp * num_chunks):
        raise ValueError(f"its pipeline is not even, or not known ({uneven})")
    return Pipeline(sizes, num_chunks, num_layers, args.get("num_experts") or 0)


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


def _groups(
    model: Mapping[str, Tensor], args: Mapping[str, Any], pipeline: Pipeline
) -> Iterator[tuple[int, int, int, int, list[str]]]:
    """Yields the identity of each buffer and its weights in registration order.

    Yields:
      Tuples of tensor-parallel rank, optimizer (0 for dense weights, 1 for experts),
      model-parallel rank (tensor parallelism innermost, pipeline outermost), model
      chunk, and canonical names.
    """
    sizes, names = pipeline.sizes, frozenset(model)
    placed: dict[tuple[int, int, int | None], list[tuple[Any, str]]] = {}
    entries = [(name, name) for name in model if is_parameter(name)]
    if HEAD not in names and sizes.pp > 1:  # tied: a copy in the last stage
        entries.append((HEAD, EMBEDDING))
    for local, name in entries:
        stage, chunk, local = pipeline.place(local)
        expert_rank, local = pipeline.expert(local)
        order = order_in_module(in_module(local, names, args))
        placed.setdefault((stage, chunk, expert_rank), []).append((order, name))
    for (stage, chunk, expert_rank), found in placed.items():
        ordered = [name for _, name in sorted(found)]
        for tp in range(sizes.tp):
            if expert_rank is None:
                yield tp, 0, stage * sizes.tp + tp, chunk, ordered
            else:
                group = (stage * sizes.ep + expert_rank) * sizes.tp + tp
                yield tp, 1, group, chunk, ordered


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
        while stop < length:
            if not left:
                raise ValueError("a buffer is longer than its parameters")
            name = left.pop()
            shape = _local_shape(name, model[name].shape, args, pipeline)
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
        if stop != length:
            raise ValueError(f"parameters end at {stop:,}, their bucket at {length:,}")
    if left:
        raise ValueError(f"a buffer is too short for {left}")


def _local_shape(
    name: str, shape: tuple[int, ...], args: Mapping[str, Any], pipeline: Pipeline
) -> tuple[int, ...]:
    return split_shape(shape, _split(name, args, pipeline), pipeline.sizes.tp)


def _split(name: str, args: Mapping[str, Any], pipeline: Pipeline) -> Split:
    if pipeline.sizes.tp == 1:
        return Split.NONE
    return split_of(name, gated=is_gated(args))


def _merge(
    parts: Mapping[str, Mapping[tuple[int, int], Mapping[str, Tensor]]],
    kind: str,
    args: Mapping[str, Any],
    pipeline: Pipeline,
) -> dict[str, Tensor]:
    merged: dict[str, Tensor] = {}
    for name, ranks in parts.items():
        split, tp = _split(name, args, pipeline), pipeline.sizes.tp
        # Ranks are numbered with tp innermost, so each run of `tp` parts is one tensor.
        found = [(group, ranks[group, t][kind]) for group, t in sorted(ranks)]
        if split is not Split.NONE:
            starts = range(0, len(found), tp)
            found = [
                (found[n][0], merge([part for _, part in found[n : n + tp]], split))
                for n in starts
            ]
        copies = tuple((f"{kind} of rank {group}", tensor) for group, tensor in found)
        merged[name] = copies[0][1] if len(copies) == 1 else Replicated(copies)
    return merged
