"""Packing of documents into rows of a fixed number of tokens."""

from __future__ import annotations

import bisect
from collections.abc import Sequence


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Packs documents into rows: the longest first, each into the fullest row it fits.

    Args:
      lengths: Length of each document, at most `capacity`.
      capacity: Length of a row.

    Returns:
      Indices of the documents of each row; the same for the same lengths.

    Raises:
      ValueError: If a document is longer than a row.

    Source: arXiv 2404.10830, "Fewer Truncations Improve Language Modeling".
    """
    if too_long := [index for index, n in enumerate(lengths) if n > capacity]:
        raise ValueError(
            f"{len(too_long)} of {len(lengths)} documents are longer than a row of "
            f"{capacity}, the first with {lengths[too_long[0]]}."
        )
    rows: list[list[int]] = []
    by_space: dict[int, list[int]] = {}  # Free space -> rows that have it.
    spaces: list[int] = []  # Keys of `by_space`, sorted.
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        found = bisect.bisect_left(spaces, lengths[index])
        if found < len(spaces):
            space = spaces[found]
            row = by_space[space].pop()
            if not by_space[space]:
                del by_space[space], spaces[found]
        else:
            space, row = capacity, len(rows)
            rows.append([])
        rows[row].append(index)
        left = space - lengths[index]
        if left not in by_space:
            bisect.insort(spaces, left)
        by_space.setdefault(left, []).append(row)
    return rows
