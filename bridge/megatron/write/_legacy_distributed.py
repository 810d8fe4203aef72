"""State of a distributed optimizer in legacy files: one flat tensor per buffer."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bridge.formats._pickle_writer import Name
from bridge.formats._source import Source
from bridge.formats._torch_writer import TorchWriter
from bridge.megatron._ranks import Rank
from bridge.megatron.read._legacy_distributed import DISTRIBUTED_NAME
from bridge.megatron.write._flat_buffers import (
    KINDS,
    FlatBuffer,
    bucket_values,
    buffer_dtypes,
    flat_buffers,
)
from bridge.megatron.write._optimizer_state import OptimizerState
from bridge.megatron.write._target import Target

Values = Callable[[FlatBuffer, int, str], Iterator[np.ndarray]]
"""Function that reads one kind of state of one bucket, parameter by parameter."""


def write_distributed(
    directory: Path,
    source: Source,
    state: OptimizerState,
    target: Target,
    tick: Callable[[int], None],
) -> None:
    """Writes `distrib_optim.pt` of each rank, with one weight's state in memory.

    Args:
      directory: Directory with a directory per rank.
      source: Tensors of the model by canonical name.
      state: Adam state of float32.
      target: Run that the checkpoint is written for.
      tick: Called after each parameter with its size in bytes.
    """

    def values(buffer: FlatBuffer, bucket: int, kind: str) -> Iterator[np.ndarray]:
        source = state.kinds[KINDS[kind]]
        for _, array in bucket_values(buffer, bucket, source, target):
            tick(array.nbytes)
            yield array

    buffers = flat_buffers(source, target)
    key = tuple(Name(f"torch.{n}") for n in buffer_dtypes(source, target.args))
    sizes = target.pipeline.sizes
    for rank in sizes.ranks():
        file = directory / sizes.directory(rank) / DISTRIBUTED_NAME
        with file.open("wb") as stream, TorchWriter(stream) as writer:
            trees = [
                _tree(writer, _held(buffers, rank, is_expert), key, values)
                for is_expert in range(len(state.chains))
            ]
            writer.finish(trees[0] if len(trees) == 1 else trees)


def _held(buffers: list[FlatBuffer], rank: Rank, is_expert: int) -> list[FlatBuffer]:
    return [b for b in buffers if (b.of.rank, b.of.is_expert) == (rank, is_expert)]


def _tree(
    writer: TorchWriter, buffers: list[FlatBuffer], key: Any, values: Values
) -> dict[Any, Any] | None:
    """Writes the buffers of one optimizer; None if another rank holds them."""
    if not buffers:
        return None
    tree: dict[Any, Any] = {"buckets_coalesced": True}
    for buffer in sorted(buffers, key=lambda buffer: buffer.of.chunk):
        size = buffer.layout.num_unpadded
        tensors: dict[str, Any] = {
            kind: writer.add_parts(
                (size,), np.dtype(np.float32), _all_buckets(buffer, kind, values)
            )
            for kind in KINDS
        }
        tree[buffer.of.chunk] = {key: {**tensors, "numel_unpadded": size}}
    return tree


def _all_buckets(buffer: FlatBuffer, kind: str, values: Values) -> Iterator[np.ndarray]:
    for bucket in range(len(buffer.layout.buckets)):
        yield from values(buffer, bucket, kind)
