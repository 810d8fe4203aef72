"""Rows as a stream of batches that can be resumed at any point."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
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


class Batches(Iterator[Any]):
    """This host's rows of global batches, without end.

    `get_state()` is a small dict for JSON, the same on all hosts, and `set_state`
    continues from it, on any: `first_row` is a row of the endless stream, and
    `next_index` the number of batches taken from there.

    Args:
      rows: Endless stream of rows.
      batch: Rows of a global batch.
      shard: Rows of a batch that this host reads.
    """

    def __init__(self, rows: grain.MapDataset, batch: int, shard: HostShard):
        self._rows, self._batch, self._shard = rows, batch, shard
        self._start(0)

    def _start(self, first_row: int) -> None:
        self._first_row = first_row
        rows = _From(self._rows, first_row)
        batches = grain.MapDataset.source(HostBatches(rows, self._batch, self._shard))
        # One thread makes the next batches while the devices work.
        ahead = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
        self._batches = iter(batches.to_iter_dataset(ahead))

    def __next__(self) -> Any:
        """Returns this host's rows of the next batch."""
        return next(self._batches)

    def get_state(self) -> dict[str, int]:
        """Returns the position of the next batch."""
        state: Any = self._batches.get_state()
        return {**state, "first_row": self._first_row}

    def set_state(self, state: Mapping[str, int]) -> None:
        """Continues from a position.

        Args:
          state: Position from `get_state`.
        """
        inner = dict(state)
        first_row = inner.pop("first_row", 0)
        if first_row != self._first_row:
            self._start(first_row)
        self._batches.set_state(inner)  # pyright: ignore[reportArgumentType]

    def last_rows(self) -> range:
        """Returns the rows of the stream that are the newest global batch."""
        stop = next_row(self.get_state(), self._batch)
        return range(stop - self._batch, stop)


@dataclasses.dataclass(frozen=True, eq=False)
class FullBatches:
    """Rows with empty ones behind them, so that the last batch is full.

    Attributes:
      rows: Rows, dicts of arrays.
      batch: Rows of a global batch.
    """

    rows: Sequence[Any]
    batch: int

    def __len__(self) -> int:
        """Returns the number of rows with the empty ones."""
        return -(-len(self.rows) // self.batch) * self.batch

    def __getitem__(self, index: int) -> Any:
        """Returns a row, or an empty one."""
        if index < len(self.rows):
            return self.rows[index]
        return {name: np.zeros_like(values) for name, values in self.rows[0].items()}


@dataclasses.dataclass(frozen=True, eq=False)
class _From:
    """A stream of rows without its first ones."""

    rows: grain.MapDataset
    first: int

    def __len__(self) -> int:
        return len(self.rows) - self.first

    def __getitem__(self, index: int) -> Any:
        return self.rows[self.first + index]


def next_row(state: Mapping[str, int], batch: int) -> int:
    """Returns the row of the stream that is read next.

    Args:
      state: Position from `Batches.get_state`.
      batch: Rows of the global batches read until then.
    """
    return state.get("first_row", 0) + state["next_index"] * batch


def with_batch(state: Mapping[str, int], stored: int, batch: int) -> dict[str, int]:
    """Returns a position for another number of rows in a batch: at the same row.

    Args:
      state: Position from `Batches.get_state`.
      stored: Rows of the global batches read until then.
      batch: Rows of the next ones.
    """
    if batch == stored:
        return dict(state)
    return {"first_row": next_row(state, stored), "next_index": 0}


def make_batches(tokens: Tokens, config: DataConfig, shard: HostShard) -> Batches:
    """Makes this host's rows of global batches, shuffled anew each epoch, without end.

    The order of the rows depends on the seed alone, never on the mesh or the batch.

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
) -> Batches:
    """Makes this host's rows of global batches from one or several sources.

    Args:
      sources: Rows of each source, by index.
      weights: Share of each source among the rows; None for a single source.
      config: Batch size and seed.
      shard: Rows of a batch that this host reads, from `host_shard`.
    """
    return Batches(mixed_rows(sources, weights, config.seed), config.batch, shard)


def mixed_rows(
    sources: Sequence[Any], weights: Sequence[float] | None, seed: int
) -> grain.MapDataset:
    """Makes an endless stream of rows, of each source shuffled anew each epoch.

    Args:
      sources: Rows of each source, by index.
      weights: Share of each source among the rows; None for a single source.
      seed: Seed of the order.
    """
    datasets = [
        grain.MapDataset.source(source).seed(seed + index).shuffle().repeat()
        for index, source in enumerate(sources)
    ]
    if len(datasets) == 1:
        return datasets[0]
    return grain.MapDataset.mix(datasets, weights)


@dataclasses.dataclass(frozen=True, eq=False)
class _Numbers:
    """The number of a source and of its row, in the place of each row."""

    source: int
    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, int]:
        return self.source, index


def origins(
    sources: Sequence[Any],
    weights: Sequence[float] | None,
    seed: int,
    rows: Sequence[int],
) -> list[tuple[int, int]]:
    """Returns the source of rows of the stream, and their indices in it.

    Args:
      sources: As for `mixed_rows`.
      weights: As for `mixed_rows`.
      seed: As for `mixed_rows`.
      rows: Rows of the stream.
    """
    numbers = [_Numbers(number, len(each)) for number, each in enumerate(sources)]
    stream = mixed_rows(numbers, weights, seed)
    found: list[Any] = [stream[row] for row in rows]
    return found


def position(batches: Batches) -> dict[str, Any]:
    """Returns the position of the stream, as JSON."""
    return batches.get_state()
