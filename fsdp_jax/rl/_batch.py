"""Batch of array columns, host object columns, and metadata."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fsdp_jax.rl._columns import (
    as_numbers,
    as_objects,
    check_alike,
    check_columns,
    joined,
    merged,
    without,
)
from fsdp_jax.rl._jagged import Jagged
from fsdp_jax.rl._same import same

Index = slice | Sequence[int] | Sequence[bool] | np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """Columns of rows: arrays for the devices, objects for the host, and metadata.

    Every method returns a new batch and leaves this one unchanged. A batch is a pytree
    whose leaves are its arrays, so `jax.tree.map` and `jax.device_put` preserve the
    rest. A function under `jax.jit` is recompiled for other objects: pass it `arrays`.

    Attributes:
      arrays: Array columns by name, `[rows, ...]`, or `Jagged`.
      objects: Columns of arbitrary Python objects, such as strings, by name; `[rows]`.
      meta: Values that apply to the batch as a whole, by name.

    Source: verl `protocol.py::DataProto`, whose contracts these are.
    """

    arrays: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    objects: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    meta: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        objects = {name: as_objects(column) for name, column in self.objects.items()}
        object.__setattr__(self, "objects", objects)
        check_columns(self.arrays, objects)

    @staticmethod
    def concat(batches: Sequence[Batch], *, listed: Sequence[str] = ()) -> Batch:
        """Concatenates the rows of batches, in order.

        Args:
          batches: Batches with the same columns; at least one.
          listed: Names in `meta` that differ from batch to batch, such as metrics:
            their values are collected in a list, without those of batches that lack the
            name. Any other name must have the same value in all batches that have it.

        Raises:
          ValueError: If there is no batch, or columns or meta differ.
        """
        if not batches:
            raise ValueError("concat got 0 batches: give at least 1.")
        check_alike([(sorted(b.arrays), sorted(b.objects)) for b in batches])
        first = batches[0]
        meta: dict[str, Any] = {}
        for batch in batches:
            meta = merged("concat", meta, without(batch.meta, listed))
        for name in listed:
            meta[name] = [batch.meta[name] for batch in batches if name in batch.meta]
        return Batch(
            {k: joined([b.arrays[k] for b in batches]) for k in first.arrays},
            {k: np.concatenate([b.objects[k] for b in batches]) for k in first.objects},
            meta,
        )

    def __len__(self) -> int:
        """Returns the number of rows; 0 for a batch of metadata only."""
        columns = [*self.arrays.values(), *self.objects.values()]
        return len(columns[0]) if columns else 0

    def __getitem__(self, index: Index) -> Batch:
        """Selects rows by a slice, by their indices, or by a mask.

        Raises:
          TypeError: If `index` is none of these.
          ValueError: If a mask has another length.
          IndexError: If a row index is out of range.
        """
        return self._map_columns(_Picked(as_numbers(index, len(self))))

    def row(self, number: int) -> dict[str, Any]:
        """Returns one row: the value of each column."""
        picked = self[[number]]
        arrays = {
            name: column.values if isinstance(column, Jagged) else column[0]
            for name, column in picked.arrays.items()
        }
        return arrays | {name: column[0] for name, column in picked.objects.items()}

    def select(self, *names: str) -> Batch:
        """Returns a batch with the columns of these names, and all of meta.

        Raises:
          ValueError: If a column does not exist.
        """
        self._check_names("select", names)
        return dataclasses.replace(
            self,
            arrays={name: self.arrays[name] for name in names if name in self.arrays},
            objects={n: self.objects[n] for n in names if n in self.objects},
        )

    def pop(self, *names: str) -> tuple[Batch, Batch]:
        """Returns a batch with the columns of these names, and one without them.

        Raises:
          ValueError: If a column does not exist.
        """
        rest = dataclasses.replace(
            self,
            arrays=without(self.arrays, names),
            objects=without(self.objects, names),
        )
        return self.select(*names), rest

    def rename(self, names: Mapping[str, str]) -> Batch:
        """Renames columns.

        Args:
          names: New names by old name.

        Raises:
          ValueError: If a column does not exist, or two would have the same name.
        """
        self._check_names("rename", list(names))
        arrays = [(names.get(k, k), column) for k, column in self.arrays.items()]
        objects = [(names.get(k, k), column) for k, column in self.objects.items()]
        renamed = [name for name, _ in arrays + objects]
        if doubles := sorted({n for n in renamed if renamed.count(n) > 1}):
            raise ValueError(f"rename: two columns would be named {doubles}.")
        return dataclasses.replace(self, arrays=dict(arrays), objects=dict(objects))

    def union(self, other: Batch) -> Batch:
        """Returns a batch with the columns and meta of both.

        Raises:
          ValueError: If the numbers of rows differ, or two values of the same name; NaN
            equals NaN.
        """
        if len(self) != len(other):
            raise ValueError(f"union of {len(self)} rows with {len(other)}.")
        return Batch(
            merged("union", self.arrays, other.arrays),
            merged("union", self.objects, other.objects),
            merged("union", self.meta, other.meta),
        )

    def reorder(self, order: Sequence[int] | np.ndarray) -> Batch:
        """Permutes the rows.

        Args:
          order: Permutation of the row indices; the first one becomes the first row.

        Raises:
          ValueError: If `order` is not a permutation of the rows.
        """
        if sorted(np.asarray(order).tolist()) != list(range(len(self))):
            raise ValueError(
                f"reorder takes each number from 0 to {len(self) - 1} once; to pick or "
                "to repeat rows, index the batch."
            )
        return self[np.asarray(order, np.int64)]

    def repeat(self, times: int | Sequence[int], *, interleave: bool = True) -> Batch:
        """Repeats each row.

        Args:
          times: Number of repeats; one for all rows, or one per row.
          interleave: Whether the copies of a row are consecutive; else the whole batch
            is repeated, which takes one number for all rows.

        Raises:
          ValueError: If a number is below 0, or there is not one per row.
        """
        numbers = np.arange(len(self))
        counts = np.asarray(times)
        if counts.shape not in ((), numbers.shape) or (counts < 0).any():
            raise ValueError(
                f"repeat: {times} is neither a number nor {len(self)} of at least 0."
            )
        if interleave:
            return self[np.repeat(numbers, counts)]
        if counts.ndim:
            raise ValueError("repeat: a number for each row needs interleave=True.")
        return self[np.tile(numbers, counts)]

    def split(self, num_rows: int) -> list[Batch]:
        """Splits into batches of `num_rows` rows; the last one has the remainder.

        Raises:
          ValueError: If `num_rows` is below 1.
        """
        if num_rows < 1:
            raise ValueError(f"split: num_rows={num_rows} must be at least 1.")
        starts = range(0, len(self), num_rows)
        return [self[start : start + num_rows] for start in starts]

    def chunk(self, num_chunks: int) -> list[Batch]:
        """Splits into `num_chunks` batches of equal size.

        Raises:
          ValueError: If the rows do not divide; use `pad_to_divisor` first.
        """
        if num_chunks < 1 or len(self) % num_chunks or not len(self):
            raise ValueError(
                f"{len(self)} rows do not divide into {num_chunks} chunks. Let "
                f"pad_to_divisor({num_chunks}) add some, and unpad what comes of it."
            )
        return self.split(len(self) // num_chunks)

    def pad_to_divisor(self, divisor: int) -> tuple[Batch, int]:
        """Repeats rows, from the first on, until `divisor` divides their number.

        Returns:
          The batch, and the number of added rows, for `unpad`.

        Raises:
          ValueError: If there is no row, or `divisor` is below 1.
        """
        if divisor < 1 or not len(self):
            raise ValueError(
                f"Cannot pad {len(self)} rows to a multiple of {divisor}: "
                "both must be at least 1."
            )
        added = -len(self) % divisor
        return self[np.arange(len(self) + added) % len(self)], added

    def unpad(self, added: int) -> Batch:
        """Removes the rows that `pad_to_divisor` added.

        Raises:
          ValueError: If there are not so many rows.
        """
        if not 0 <= added < max(len(self), 1):
            raise ValueError(f"unpad takes {added} from {len(self)} rows.")
        return self[: len(self) - added]

    def iterate(
        self, num_rows: int, *, epochs: int = 1, seed: int | None = None
    ) -> Iterator[Batch]:
        """Iterates over batches of `num_rows` rows, for several epochs.

        Args:
          num_rows: Number of rows per batch, a divisor of the rows of this one.
          epochs: Number of passes over the rows.
          seed: Seed of a new shuffle in each epoch; None keeps the order of the rows.

        Raises:
          ValueError: If the rows do not divide.
        """
        if num_rows < 1 or len(self) % num_rows:
            raise ValueError(
                f"{len(self)} rows do not divide into batches of {num_rows}; split "
                "gives a smaller last one."
            )
        random = None if seed is None else np.random.default_rng(seed)
        return self._epochs(num_rows, epochs, random)

    def _epochs(
        self, num_rows: int, epochs: int, random: np.random.Generator | None
    ) -> Iterator[Batch]:
        for _ in range(epochs):
            rows = self if random is None else self[random.permutation(len(self))]
            yield from rows.split(num_rows)

    def _map_columns(self, function: Any) -> Batch:
        arrays = {name: function(column) for name, column in self.arrays.items()}
        objects = {name: function(column) for name, column in self.objects.items()}
        return Batch(arrays, objects, self.meta)

    def _check_names(self, what: str, names: Sequence[str]) -> None:
        known = {*self.arrays, *self.objects}
        if missing := [name for name in names if name not in known]:
            raise ValueError(
                f"{what}: there is no column {', '.join(missing)}; there are "
                f"{', '.join(sorted(known)) or 'none'}."
            )


@dataclasses.dataclass(frozen=True)
class _Picked:
    """Selects rows of a column."""

    numbers: np.ndarray

    def __call__(self, column: Any) -> Any:
        return column[self.numbers]


@dataclasses.dataclass(frozen=True, eq=False)
class _Aside:
    """The non-array parts of a batch, as static metadata of the pytree."""

    objects: Mapping[str, Any]
    meta: Mapping[str, Any]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Aside):
            return NotImplemented
        return same(self.objects, other.objects) and same(self.meta, other.meta)

    def __hash__(self) -> int:
        return hash((*sorted(self.objects), *sorted(self.meta)))


def _flatten(batch: Batch) -> tuple[list[tuple[Any, Any]], Any]:
    names = sorted(batch.arrays)
    children = [(jax.tree_util.DictKey(name), batch.arrays[name]) for name in names]
    return children, (tuple(names), _Aside(batch.objects, batch.meta))


def _unflatten(static: Any, children: Iterable[Any]) -> Batch:
    names, aside = static
    # Bypasses __post_init__: jax also unflattens with leaves that are not arrays.
    batch = object.__new__(Batch)
    object.__setattr__(batch, "arrays", dict(zip(names, children, strict=True)))
    object.__setattr__(batch, "objects", aside.objects)
    object.__setattr__(batch, "meta", aside.meta)
    return batch


jax.tree_util.register_pytree_with_keys(Batch, _flatten, _unflatten)
