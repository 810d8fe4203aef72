"""Rows of preference pairs: two answers to a prompt, each in a row of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32

from fsdp_jax.data._documents import DocumentRows, Documents, Row


@dataclasses.dataclass(frozen=True, eq=False)
class PairRows:
    """Preference pairs for training, as a source for grain or `HostBatches`.

    Attributes:
      documents: Documents of at most `seq + 1` tokens: the chosen answer of each pair
        behind its prompt, and then the rejected one.
      seq: Number of tokens of a row.
      reference: Log-probabilities of both answers by the reference model; None before
        they are known.
    """

    documents: Documents
    seq: int
    reference: Float32[np.ndarray, "pairs 2"] | None = None

    def __len__(self) -> int:
        """Returns the number of pairs."""
        return len(self.documents) // 2

    @property
    def rows(self) -> Sequence[Sequence[int]]:
        """Indices of the documents of each pair."""
        return [(2 * index, 2 * index + 1) for index in range(len(self))]

    def __getitem__(self, index: int) -> Row:
        """Returns a pair: the arrays of `DocumentRows`, `[2, seq]`, chosen first.

        With the reference also `reference`, float32 `[2]`.
        """
        sides = DocumentRows(self.documents, [(2 * index,), (2 * index + 1,)], self.seq)
        chosen, rejected = sides[0], sides[1]
        row = {name: np.stack([chosen[name], rejected[name]]) for name in chosen}
        if self.reference is not None:
            row["reference"] = self.reference[index]
        return row


@dataclasses.dataclass(frozen=True, eq=False)
class RewardRows(PairRows):
    """Preference pairs for a reward model, which is read at the last token.

    The rows hold every token of a document, the last one too, and no targets.

    Attributes:
      documents: Documents of at most `seq` tokens, as in `PairRows`.
      seq: Number of tokens of a row.
    """

    def __getitem__(self, index: int) -> Row:
        """Returns a pair: `tokens`, `segment_ids`, `positions` and `weights`.

        Each is `[2, seq]`, chosen first; the weight of the last token is 1, of the
        others 0.
        """
        names = ("tokens", "segment_ids", "positions")
        row: Row = {name: np.zeros((2, self.seq), np.int32) for name in names}
        row["weights"] = np.zeros((2, self.seq), np.float32)
        for side, document in enumerate(self.rows[index]):
            ids = self.documents.ids[self.documents.bounds(document)]
            row["tokens"][side, : len(ids)] = ids
            row["segment_ids"][side, : len(ids)] = 1
            row["positions"][side, : len(ids)] = np.arange(len(ids))
            row["weights"][side, len(ids) - 1] = 1
        return row
