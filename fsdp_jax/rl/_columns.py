"""Checks, indexing, concatenation and merging of the columns of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fsdp_jax.rl._jagged import Jagged, concatenate
from fsdp_jax.rl._same import same


def as_objects(column: Any) -> np.ndarray:
    """Returns a one-dim object array of a column, whatever its objects are."""
    if isinstance(column, np.ndarray) and column.dtype == object and column.ndim == 1:
        return column
    column = list(column)
    # np.array(column, object) would turn nested sequences into further dims.
    objects = np.empty(len(column), object)
    for number, value in enumerate(column):
        objects[number] = value
    return objects


def check_columns(arrays: Mapping[str, Any], objects: Mapping[str, np.ndarray]) -> None:
    """Raises a `ValueError` unless columns have equal row counts and distinct names."""
    both = sorted(arrays.keys() & objects.keys())
    scalars = sorted(
        n for n, c in arrays.items() if np.ndim(getattr(c, "values", c)) == 0
    )
    if both or scalars:
        raise ValueError(
            "The columns of a batch need different names, and rows; got "
            + ", ".join(
                [f"{name} 2 times" for name in both]
                + [f"{name} of shape ()" for name in scalars]
            )
        )
    rows = {name: len(column) for name, column in {**arrays, **objects}.items()}
    if len(set(rows.values())) > 1:
        shown = ", ".join(f"{name}: {number}" for name, number in rows.items())
        raise ValueError(f"The columns of a batch differ in rows: {shown}.")


def check_alike(kinds: Sequence[tuple[list[str], list[str]]]) -> None:
    """Raises a `ValueError` unless all batches have the same column names."""
    if other := [number for number, kind in enumerate(kinds) if kind != kinds[0]]:
        raise ValueError(
            f"concat: batch {other[0]} has the columns {kinds[other[0]]}; batch 0 has "
            f"{kinds[0]}."
        )


def as_numbers(index: Any, num_rows: int) -> np.ndarray:
    """Returns the row indices that an index selects."""
    if isinstance(index, slice):
        return np.arange(num_rows)[index]
    if not isinstance(index, list | tuple | np.ndarray | jax.Array):
        raise TypeError(
            f"A batch is indexed by a slice, numbers or a mask, not by {index!r}; "
            "batch.row(number) is one row."
        )
    index = np.asarray(index)
    if index.dtype == bool:
        if index.shape != (num_rows,):
            raise ValueError(f"a mask of {index.shape} for {num_rows} rows.")
        return np.flatnonzero(index)
    if index.size and not np.issubdtype(index.dtype, np.integer):
        raise TypeError(f"A batch is indexed by whole numbers, not by {index.dtype}.")
    return np.arange(num_rows)[index.astype(np.int64)]


def joined(columns: Sequence[Any]) -> Any:
    """Concatenates columns."""
    if all(isinstance(column, Jagged) for column in columns):
        return Jagged(
            concatenate([column.values for column in columns]),
            np.concatenate([np.asarray(column.lengths) for column in columns]),
        )
    return concatenate(columns)


def merged(what: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """Merges two mappings; raises a `ValueError` if their values conflict."""
    clash = [name for name in a if name in b and not same(a[name], b[name])]
    if clash:
        raise ValueError(
            f"{what}: conflicting values for {', '.join(clash)}. Rename or leave out "
            "one of them."
        )
    return {**a, **b}


def without(values: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Returns the mapping without the given names."""
    return {name: value for name, value in values.items() if name not in names}
