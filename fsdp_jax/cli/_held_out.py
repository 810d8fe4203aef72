"""Evaluation on held-out data while a run trains."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import fsdp_jax as fsdp
from fsdp_jax.cli._context_parallel import split_rows
from fsdp_jax.cli._data import FullBatches, Windows
from fsdp_jax.cli._data_config import DataConfig
from fsdp_jax.cli._decoder_loss import held_out_loss
from fsdp_jax.cli._document_data import DocumentData
from fsdp_jax.cli._training_data import TrainingData
from fsdp_jax.data._documents import Row


@dataclasses.dataclass(frozen=True, eq=False)
class HeldOut:
    """Held-out data, and when it is evaluated.

    Attributes:
      rows: Rows of documents, or of text in the same form.
      batch: Rows of a global batch.
      every: Interval of steps.
      fused: Whether logits are computed by chunks of the vocabulary.
    """

    rows: Sequence[Row]
    batch: int
    every: int
    fused: bool

    def is_due(self, step: int, last: int) -> bool:
        """Returns whether the data is evaluated after a step.

        Args:
          step: Number of the step.
          last: Last step of the run, which is always evaluated.
        """
        return step % self.every == 0 or step == last

    def make(self, plan: fsdp.Plan) -> Callable[[fsdp.TrainState], float]:
        """Makes the function that evaluates a state.

        Args:
          plan: Plan of the decoder.

        Returns:
          Function from a state to the mean loss of all trained tokens of the rows.
        """
        step = fsdp.make_eval_step(
            plan, held_out_loss(fused=self.fused), calculate_per_token_loss=True
        )
        shard = fsdp.host_shard(plan.mesh)
        batches = fsdp.HostBatches(
            FullBatches(self.rows, self.batch), self.batch, shard
        )

        def evaluate(state: fsdp.TrainState) -> float:
            total, count = 0.0, 0
            for index in range(len(batches)):
                rows = split_rows(batches[index], plan.mesh.shape["cp"])
                batch = fsdp.global_batch(plan.mesh, rows, self.batch)
                tokens = self._tokens(index)
                measured = step(state.params, batch, model_state=state.model_state)
                total += float(measured["loss"]) * tokens
                count += tokens
            return total / count

        return evaluate

    def _tokens(self, index: int) -> int:
        """Returns the number of trained tokens of a global batch."""
        numbers = range(index * self.batch, (index + 1) * self.batch)
        rows = (self.rows[i] for i in numbers if i < len(self.rows))
        return sum(int(row["weights"].sum()) for row in rows)


def hold_out(
    data: TrainingData, config: DataConfig, *, every: int, fused: bool
) -> HeldOut:
    """Prepares held-out data.

    Args:
      data: Data from `read_data`.
      config: Batch and row length.
      every: Interval of steps.
      fused: Whether logits are computed by chunks of the vocabulary.

    Raises:
      ValueError: If text does not fill a row.
    """
    if isinstance(data, DocumentData):
        rows: Sequence[Any] = [row for source in data.sources for row in _each(source)]
    else:
        windows = Windows(data, config.seq)
        if not len(windows):
            raise ValueError(
                f"--eval-data holds {len(data)} tokens, but a row of --seq "
                f"{config.seq} takes {config.seq + 1}. Use more data."
            )
        rows = _TextRows(windows)
    return HeldOut(rows, config.batch, every, fused)


def _each(source: Any) -> list[Row]:
    return [source[index] for index in range(len(source))]


@dataclasses.dataclass(frozen=True, eq=False)
class _TextRows(Sequence[Row]):
    """Windows of text in the form of rows of documents."""

    windows: Windows

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: Any) -> Any:
        tokens = self.windows[index]
        seq = len(tokens) - 1
        return {
            "tokens": tokens[:-1],
            "targets": tokens[1:],
            "segment_ids": np.ones(seq, np.int32),
            "positions": np.arange(seq, dtype=np.int32),
            "weights": np.ones(seq, np.float32),
        }
