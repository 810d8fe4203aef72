"""Writer of optimizer state in flat buckets (`dp_reshardable`), Megatron's default.

Each parameter, each gap between two, and each end of a data-parallel rank's shard ends
a chunk, so that a run of the same model-parallel sizes and buckets loads the state with
any number of data-parallel ranks that divides it alike.

Source: Megatron-LM megatron/core/optimizer/distrib_optimizer.py
::DistributedOptimizer.sharded_param_state_dp_reshardable
"""

import itertools
from collections.abc import Callable, Iterator

from bridge._box import Range
from bridge.formats._pickle_writer import Name
from bridge.formats._source import Source
from bridge.megatron.write._dcp import DcpWriter
from bridge.megatron.write._flat_buffers import (
    KINDS,
    FlatBuffer,
    bucket_values,
    buffer_dtypes,
    flat_buffers,
)
from bridge.megatron.write._optimizer_state import OptimizerState
from bridge.megatron.write._optimizer_tree import groups_with_step
from bridge.megatron.write._target import Target


def write_buckets(
    writer: DcpWriter,
    source: Source,
    state: OptimizerState,
    target: Target,
    tick: Callable[[int], None],
) -> None:
    """Writes the buckets of all ranks; one weight's state is in memory at a time.

    Args:
      writer: Writer of the checkpoint.
      source: Tensors of the model by canonical name.
      state: Adam state.
      target: Run that the checkpoint is written for.
      tick: Called after each parameter with its size in bytes.
    """
    buffers = flat_buffers(source, target)
    names = [f"torch.{name}" for name in buffer_dtypes(source, target.args)]
    dtypes = ", ".join(names)
    for buffer in buffers:
        group = f"{_group(buffer, state)}.gbuf_idx_{buffer.of.chunk}.dtype_({dtypes})"
        for number, kind in itertools.product(range(_count(buffer)), KINDS):
            tensors = state.kinds[KINDS[kind]]
            ends = _shard_ends(buffer, number)
            for span, values in bucket_values(buffer, number, tensors, target):
                for piece in _pieces(span, ends):
                    part = values[piece.start - span.start : piece.stop - span.start]
                    key = f"{group}.bucket_idx_{number}.{kind}"
                    writer.add(key, (piece.start,), part)
                tick(values.nbytes)
    _write_settings(writer, buffers, state, tuple(map(Name, names)))


def _write_settings(
    writer: DcpWriter,
    buffers: list[FlatBuffer],
    state: OptimizerState,
    dtypes: tuple[Name, ...],
) -> None:
    """Writes each rank's parameter groups and sizes of buckets."""
    groups: dict[str, list[FlatBuffer]] = {}
    for buffer in sorted(buffers, key=lambda buffer: buffer.of.chunk):
        groups.setdefault(_group(buffer, state), []).append(buffer)
    for group, of_group in groups.items():
        chain = state.chains[int(of_group[0].of.is_expert)]
        sizes = [buffer.layout.buckets for buffer in of_group]
        numbers = {
            "per_bucket_numel": [
                {dtypes: [bucket.num_elements for bucket in of]} for of in sizes
            ],
            "per_bucket_numel_unpadded": [
                {dtypes: [bucket.num_unpadded for bucket in of]} for of in sizes
            ],
        }
        settings = {"param_groups": groups_with_step(state, chain)}
        for name, value in {"optimizer": settings, **numbers}.items():
            writer.add_item(f"{group}.{name}/shard_0_1", [value])


def _group(buffer: FlatBuffer, state: OptimizerState) -> str:
    chained = f"chained_{int(buffer.of.is_expert)}." if len(state.chains) > 1 else ""
    return f"{chained}optimizer.distributed.dp_group_idx_{buffer.of.group}"


def _count(buffer: FlatBuffer) -> int:
    return len(buffer.layout.buckets)


def _shard_ends(buffer: FlatBuffer, number: int) -> list[int]:
    """Returns where data-parallel ranks' shards of a bucket end, from its start."""
    bucket = buffer.layout.buckets[number]
    size = bucket.num_elements // (buffer.layout.num_shards or 1)
    return list(range(size, bucket.num_elements + 1, size))


def _pieces(span: Range, ends: list[int]) -> Iterator[Range]:
    """Cuts a range at the ends that lie inside of it."""
    inside = [end for end in ends if span.start < end < span.stop]
    for start, stop in itertools.pairwise([span.start, *inside, span.stop]):
        yield Range(start, stop)
