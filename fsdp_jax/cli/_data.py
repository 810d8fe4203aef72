"""Rows as a stream of batches that can be resumed at any point."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import grain
import numpy as np
from jaxtyping import Int32

from fsdp_jax.cli._data_config import DataConfig
from fsdp_jax.cli._tokens import Tokens
from fsdp_jax.data._host_batches import HostBatches, HostShard


@dataclasses.dataclass(frozen=True, eq=False)
class Windows:
    """Tokens cut into rows, each starting with the last token of the one before.

    Every token but the first is predicted once an epoch.

    Attributes:
      tokens: Text.
      seq: Tokens that a row predicts.
    """

    tokens: Tokens
    seq: int

    def __len__(self) -> int:
        """Returns the number of rows; tokens that fill no row are left out."""
        return max(len(self.tokens) - 1, 0) // self.seq

    def __getitem__(self, index: int) -> Int32[np.ndarray, " seq+1"]:
        """Returns a row."""
        start = index * self.seq
        return self.tokens[start : start + self.seq + 1].astype(np.int32)


def make_batches(
    tokens: Tokens, config: DataConfig, shard: HostShard
) -> grain.DatasetIterator:
    """Makes this host's rows of global batches, shuffled anew each epoch, without end.

    The order depends on the config alone, never on the mesh. `get_state()` is a small
    dict for JSON, the same on all hosts, and `set_state` continues from it, on any.

    Args:
      tokens: Text.
      config: Batch, row length and seed.
      shard: Rows of a batch that this host reads, from `host_shard`.

    Raises:
      ValueError: If the tokens do not fill a single row.
    """
    windows = Windows(tokens, config.seq)
    if not len(windows):
        raise ValueError(
            f"--data holds {len(tokens)} tokens, but a row of --seq {config.seq} takes "
            f"{config.seq + 1}. Use more data or a smaller --seq."
        )
    return mixed_batches([windows], None, config, shard)


def mixed_batches(
    sources: Sequence[Any],
    weights: Sequence[float] | None,
    config: DataConfig,
    shard: HostShard,
) -> grain.DatasetIterator:
    """Makes this host's rows of global batches from one or several sources.

    Each source is shuffled, anew each epoch, and repeated without end. The order
    depends on the config alone, as for `make_batches`.

    Args:
      sources: Rows of each source, by index.
      weights: Share of each source among the rows; None for a single source.
      config: Batch size and seed.
      shard: Rows of a batch that this host reads, from `host_shard`.
    """
    datasets = [
        grain.MapDataset.source(source).seed(config.seed + index).shuffle().repeat()
        for index, source in enumerate(sources)
    ]
    rows = datasets[0]
    if len(datasets) > 1:
        rows = grain.MapDataset.mix(datasets, weights)
    batches = grain.MapDataset.source(HostBatches(rows, config.batch, shard))
    # One thread makes the next batches while the devices work.
    ahead = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
    return iter(batches.to_iter_dataset(ahead))


def position(batches: grain.DatasetIterator) -> dict[str, Any]:
    """Returns the position of the stream, as JSON."""
    return dict(batches.get_state())  # pyright: ignore[reportArgumentType]
