"""Parts of a batch that a layer runs side by side, so that one hides the other."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


def split_rows(tree: Any, rows: int, parts: int) -> list[Any]:
    """Splits the arrays of a tree along their first dim.

    Args:
      tree: Arrays whose first dim is the batch, and arrays that all rows share, whose
        first dim is another.
      rows: Rows of the batch.
      parts: Number of parts; of fewer rows, each is a part. Where they do not divide
        the rows, the first parts have one row more.

    Returns:
      One tree per part.
    """
    parts = min(parts, rows)
    size, more = divmod(rows, parts)
    stops = [(part + 1) * size + min(part + 1, more) for part in range(parts)]

    def part_of(start: int, stop: int) -> Any:
        def rows_of(leaf: Any) -> Any:
            has_rows = getattr(leaf, "ndim", 0) and leaf.shape[0] == rows
            return leaf[start:stop] if has_rows else leaf

        return jax.tree.map(rows_of, tree)

    return [part_of(*ends) for ends in zip([0, *stops[:-1]], stops, strict=True)]


def join_rows(parts: Sequence[Any]) -> Any:
    """Concatenates the arrays of trees along their first dim.

    Args:
      parts: Trees of arrays, whose first dim is the batch.
    """
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)
