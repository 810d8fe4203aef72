"""Rows of different lengths in one array."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Shaped

Values = Shaped[Array, "total ..."] | Shaped[np.ndarray, "total ..."]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Jagged:
    """Rows of different lengths, one behind the other, without padding.

    Which rows there are is known on the host alone: picking some moves values whose
    number depends on it, which no compiled program can. `to_padded` makes what one can.

    Attributes:
      values: All rows in order, `[total, ...]`.
      lengths: Of each row, `[rows]`; their sum is `total`.
    """

    values: Values
    lengths: Int[np.ndarray, " rows"]

    @staticmethod
    def from_rows(rows: Sequence[Any]) -> Jagged:
        """Puts rows behind each other.

        Args:
          rows: Arrays `[length, ...]`, at least one, alike but for their lengths.

        Raises:
          ValueError: If there is none, or they differ in more than lengths.
        """
        kinds = {(row.dtype, row.shape[1:]) for row in rows}
        if len(kinds) != 1:
            shown = ", ".join(f"{dtype}{list(shape)}" for dtype, shape in kinds)
            raise ValueError(
                f"Jagged rows differ in lengths alone; got {shown or '0 rows'}."
            )
        lengths = np.array([len(row) for row in rows], np.int64)
        return Jagged(concatenate(rows), lengths)

    @staticmethod
    def from_padded(
        padded: Shaped[Array, "rows length ..."]
        | Shaped[np.ndarray, "rows length ..."],
        mask: Bool[np.ndarray, "rows length"],
    ) -> Jagged:
        """Takes the marked elements of each row.

        Args:
          padded: Rows with padding anywhere.
          mask: Which elements are none.
        """
        marks = np.asarray(mask, bool)
        return Jagged(padded[marks], marks.sum(axis=1))

    def __len__(self) -> int:
        """Rows."""
        return len(self.lengths)

    def rows(self) -> list[Values]:
        """Each row, `[length, ...]`."""
        ends = np.cumsum(self.lengths)
        return [
            self.values[end - length : end]
            for end, length in zip(ends, self.lengths, strict=True)
        ]

    def __getitem__(self, indices: Int[np.ndarray, " picked"]) -> Jagged:
        """Some of the rows, in the order of `indices`."""
        lengths = np.asarray(self.lengths)[indices]
        starts = (np.cumsum(self.lengths) - self.lengths)[indices]
        # Where each picked value is: its row's start, and how far it is from there.
        behind = np.cumsum(lengths) - lengths
        within = np.arange(lengths.sum()) - np.repeat(behind, lengths)
        return Jagged(self.values[np.repeat(starts, lengths) + within], lengths)

    def to_padded(
        self, length: int | None = None, fill: Any = 0
    ) -> tuple[Shaped[Any, "rows length ..."], Bool[np.ndarray, "rows length"]]:
        """Rows of one length, and which of their elements are no padding.

        Args:
          length: Default that of the longest row.
          fill: What stands behind a row's end.

        Raises:
          ValueError: If a row is longer.
        """
        longest = int(max(self.lengths, default=0))
        length = longest if length is None else length
        if longest > length:
            raise ValueError(f"a row has {longest} elements, more than {length}.")
        mask = np.arange(length) < np.asarray(self.lengths)[:, None]
        shape = (len(self), length, *self.values.shape[1:])
        if isinstance(self.values, np.ndarray):
            padded = np.full(shape, fill, self.values.dtype)
            padded[mask] = self.values
            return padded, mask
        return jnp.full(shape, fill, self.values.dtype).at[mask].set(self.values), mask


def concatenate(parts: Sequence[Any]) -> Any:
    """Along the first dim; numpy's where all are numpy's."""
    host = all(isinstance(part, np.ndarray) for part in parts)
    return np.concatenate(parts) if host else jnp.concatenate(parts)
