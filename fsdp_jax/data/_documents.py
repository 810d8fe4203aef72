"""Tokenized documents, and rows of several of them that do not see each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int32, Int64

from fsdp_jax.data._packing import best_fit_decreasing

Row = dict[str, np.ndarray]
"""`tokens`, `targets`, `segment_ids` and `positions`, int32 `[seq]`, and `weights`,
float32 `[seq]`: 1 where the target is trained."""


@dataclasses.dataclass(frozen=True, eq=False)
class Documents:
    """Token ids of documents, one after the other.

    Attributes:
      ids: Token ids of all documents.
      trained: Whether each token is to be predicted. The first of a document never is,
        since no token stands before it, and its value is not read.
      ends: Index behind the last token of each document.
      numbers: Number of each document in its file: its line, or row of a table.
    """

    ids: Int32[np.ndarray, " tokens"]
    trained: Bool[np.ndarray, " tokens"]
    ends: Int64[np.ndarray, " documents"]
    numbers: Int64[np.ndarray, " documents"]

    def __len__(self) -> int:
        """Returns the number of documents."""
        return len(self.ends)

    def bounds(self, index: int) -> slice:
        """Returns the tokens of a document.

        Args:
          index: Index of the document.
        """
        start = int(self.ends[index - 1]) if index else 0
        return slice(start, int(self.ends[index]))

    @property
    def lengths(self) -> Int64[np.ndarray, " documents"]:
        """Number of tokens of each document."""
        return np.diff(self.ends, prepend=0)

    @property
    def num_predicted(self) -> int:
        """Number of tokens that are trained and not the first of their document."""
        firsts = (self.ends - self.lengths)[self.lengths > 0]
        return int(self.trained.sum()) - int(self.trained[firsts].sum())


def join_documents(
    documents: Sequence[tuple[Sequence[int], Sequence[bool]]],
    numbers: Sequence[int] | None = None,
) -> Documents:
    """Joins documents.

    Args:
      documents: Token ids of each document, and whether each token is trained.
      numbers: Number of each in its file; default 1, 2, ...
    """
    if numbers is None:
        numbers = range(1, len(documents) + 1)
    ids = [np.asarray(found, np.int32) for found, _ in documents]
    trained = [np.asarray(flags, bool) for _, flags in documents]
    return Documents(
        np.concatenate([np.zeros(0, np.int32), *ids]),
        np.concatenate([np.zeros(0, bool), *trained]),
        np.cumsum([len(found) for found in ids], dtype=np.int64),
        np.asarray(numbers, np.int64),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class DocumentRows:
    """Rows of documents for training, as a source for grain or `HostBatches`.

    A token attends to those before it in its own document alone: `segment_ids` are 1,
    2, ... by document and 0 for padding, and `positions` restart with each.

    Attributes:
      documents: Documents of at most `seq + 1` tokens.
      rows: Indices of the documents of each row.
      seq: Number of tokens of a row.
    """

    documents: Documents
    rows: Sequence[Sequence[int]]
    seq: int

    def __len__(self) -> int:
        """Returns the number of rows."""
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        """Returns a row."""
        names = ("tokens", "targets", "segment_ids", "positions")
        row: Row = {name: np.zeros(self.seq, np.int32) for name in names}
        row["weights"] = np.zeros(self.seq, np.float32)
        start = 0
        for segment, document in enumerate(self.rows[index], 1):
            bounds = self.documents.bounds(document)
            ids, trained = self.documents.ids[bounds], self.documents.trained[bounds]
            place = slice(start, start + len(ids) - 1)
            row["tokens"][place], row["targets"][place] = ids[:-1], ids[1:]
            row["weights"][place] = trained[1:]
            row["segment_ids"][place] = segment
            row["positions"][place] = np.arange(len(ids) - 1)
            start = place.stop
        return row


def document_rows(documents: Documents, seq: int, *, packed: bool) -> DocumentRows:
    """Puts documents into rows.

    Args:
      documents: Documents of at most `seq + 1` tokens.
      seq: Number of tokens of a row.
      packed: Whether a row has several documents, or one and padding.

    Raises:
      ValueError: If a document is longer, or has no token.
    """
    if (empty := documents.numbers[documents.lengths == 0]).size:
        raise ValueError(
            f"{empty.size} of {len(documents)} documents have no token, the first is "
            f"document {empty[0]}. Leave them out."
        )
    rows = best_fit_decreasing((documents.lengths - 1).tolist(), seq)
    if not packed:
        rows = [[index] for index in range(len(documents))]
    return DocumentRows(documents, rows, seq)
