"""Tokens as a stream of batches that stops and goes on at any point."""

from __future__ import annotations

import dataclasses
from typing import Any

import grain
import numpy as np
from jaxtyping import Int32

from fsdp_jax.cli._tokens import Tokens
from fsdp_jax.cli._train_config import Recipe
from fsdp_jax.data._host_batches import HostBatches, HostShard


@dataclasses.dataclass(frozen=True, eq=False)
class Windows:
    """Tokens cut into rows; the last token of one is the first of the next.

    So every token but the very first is predicted once an epoch.

    Attributes:
      tokens: All of them.
      seq: Tokens that a row predicts.
    """

    tokens: Tokens
    seq: int

    def __len__(self) -> int:
        """Rows; the tokens that fill no row are left out."""
        return max(len(self.tokens) - 1, 0) // self.seq

    def __getitem__(self, index: int) -> Int32[np.ndarray, " seq+1"]:
        """One row."""
        start = index * self.seq
        return self.tokens[start : start + self.seq + 1].astype(np.int32)


def make_batches(
    tokens: Tokens, recipe: Recipe, shard: HostShard
) -> grain.DatasetIterator:
    """Shuffles rows, anew each epoch, without end, into this host's of global batches.

    The order depends on the recipe alone, never on the mesh. `get_state()` is a small
    dict for JSON, the same on all hosts, and `set_state` goes on from there, on any.

    Args:
      tokens: The text.
      recipe: Batch, row length and seed.
      shard: The rows of a batch that are read here, from `host_shard`.

    Raises:
      ValueError: If the tokens do not fill a single row.
    """
    windows = Windows(tokens, recipe.seq)
    if not len(windows):
        raise ValueError(
            f"--data holds {len(tokens)} tokens, but a row of --seq {recipe.seq} takes "
            f"{recipe.seq + 1}. Use more data or a smaller --seq."
        )
    rows = grain.MapDataset.source(windows).seed(recipe.seed).shuffle().repeat()
    batches = grain.MapDataset.source(HostBatches(rows, recipe.batch, shard))
    # One thread makes the next batches while the devices work.
    ahead = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
    return iter(batches.to_iter_dataset(ahead))


def position(batches: grain.DatasetIterator) -> dict[str, Any]:
    """Returns the position in the stream, as JSON."""
    return dict(batches.get_state())  # pyright: ignore[reportArgumentType]
