"""Jagged arrays: rows of different lengths in one array."""

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
    """Rows of different lengths, concatenated without padding.

    Lengths are known on the host only: the number of values in a selection of rows
    depends on them, and shapes in a compiled program cannot. `to_padded` returns arrays
    that can be used there.

    Attributes:
      values: Values of all rows in order, `[total, ...]`.
      lengths: Length of each row, `[rows]`; their sum is `total`.
    """

    values: Values
    lengths: Int[np.ndarray, " rows"]

    @staticmethod
    def from_rows(rows: Sequence[Any]) -> Jagged:
        """Concatenates rows.

        Args:
          rows: Arrays `[length, ...]`, at least one, which differ in their lengths
            only.

        Raises:
          ValueError: If there is none, or they differ in dtype or other dims.
        """
        kinds = {(row.dtype, row.shape[1:]) for row in rows}
        if len(kinds) != 1:
            shown = ", ".join(f"{dtype}{list(shape)}" for dtype, shape in kinds)
            raise ValueError(
                f"Jagged rows may differ only in length; got {shown or '0 rows'}."
            )
        lengths = np.array([len(row) for row in rows], np.int64)
        return Jagged(concatenate(rows), lengths)

    @staticmethod
    def from_padded(
        padded: Shaped[Array, "rows length ..."]
        | Shaped[np.ndarray, "rows length ..."],
        mask: Bool[np.ndarray, "rows length"],
    ) -> Jagged:
        """Selects the elements of each row where the mask is True.

        Args:
          padded: Rows with padding anywhere.
          mask: True for elements that are not padding.
        """
        marks = np.asarray(mask, bool)
        return Jagged(padded[marks], marks.sum(axis=1))

    def __len__(self) -> int:
        """Returns the number of rows."""
        return len(self.lengths)

    def rows(self) -> list[Values]:
        """Returns the rows, each `[length, ...]`."""
        ends = np.cumsum(self.lengths)
        return [
            self.values[end - length : end]
            for end, length in zip(ends, self.lengths, strict=True)
        ]

    def __getitem__(self, indices: Int[np.ndarray, " picked"]) -> Jagged:
        """Selects rows, in the order of `indices`."""
        lengths = np.asarray(self.lengths)[indices]
        starts = (np.cumsum(self.lengths) - self.lengths)[indices]
        # Position of each selected value: the start of its row, plus its offset there.
        behind = np.cumsum(lengths) - lengths
        within = np.arange(lengths.sum()) - np.repeat(behind, lengths)
        return Jagged(self.values[np.repeat(starts, lengths) + within], lengths)

    def to_padded(
        self, length: int | None = None, fill: Any = 0
    ) -> tuple[Shaped[Any, "rows length ..."], Bool[np.ndarray, "rows length"]]:
        """Returns rows of one length, and a mask that is False for padding.

        Args:
          length: Length of the padded rows; default that of the longest row.
          fill: Value of the padding.

        Raises:
          ValueError: If a row is longer than `length`.
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
    """Concatenates along the first dim, with numpy if all parts are numpy arrays."""
    host = all(isinstance(part, np.ndarray) for part in parts)
    return np.concatenate(parts) if host else jnp.concatenate(parts)
