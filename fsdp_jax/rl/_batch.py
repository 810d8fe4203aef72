"""Rows of arrays and of host objects that belong together."""

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
    """Columns of rows: arrays for the devices, objects for the host, and what is said.

    Every method returns a new batch and leaves this one as it is. It is a pytree whose
    leaves are its arrays, so `jax.tree.map` and `jax.device_put` keep the rest. A
    function under `jax.jit` is compiled anew for other objects: give it `arrays`.

    Attributes:
      arrays: Columns by name, `[rows, ...]`, or `Jagged`.
      objects: Columns of any Python objects, such as strings, by name; `[rows]`.
      meta: What holds for the batch as a whole.

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
        """Puts the rows of batches behind each other, in order.

        Args:
          batches: With the same columns; at least one.
          listed: Names in `meta` that differ from batch to batch, such as metrics: the
            values are put in a list, without those of batches that have none. Other
            names must have one value, in all batches that have the name.

        Raises:
          ValueError: If columns or meta differ.
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
        """Rows; 0 for a batch of nothing but meta."""
        columns = [*self.arrays.values(), *self.objects.values()]
        return len(columns[0]) if columns else 0

    def __getitem__(self, index: Index) -> Batch:
        """Some of the rows: by a slice, by their numbers, or by a mask.

        Raises:
          TypeError: If it is none of these.
          ValueError: If a mask has another length.
          IndexError: If there is no such row.
        """
        return self._map_columns(_Picked(as_numbers(index, len(self))))

    def row(self, number: int) -> dict[str, Any]:
        """One row: the value of each column."""
        picked = self[[number]]
        arrays = {
            name: column.values if isinstance(column, Jagged) else column[0]
            for name, column in picked.arrays.items()
        }
        return arrays | {name: column[0] for name, column in picked.objects.items()}

    def select(self, *names: str) -> Batch:
        """The columns of these names, and all of meta.

        Raises:
          ValueError: If there are no such columns.
        """
        self._check_names("select", names)
        return dataclasses.replace(
            self,
            arrays={name: self.arrays[name] for name in names if name in self.arrays},
            objects={n: self.objects[n] for n in names if n in self.objects},
        )

    def pop(self, *names: str) -> tuple[Batch, Batch]:
        """The columns of these names, and the batch without them.

        Raises:
          ValueError: If there are no such columns.
        """
        rest = dataclasses.replace(
            self,
            arrays=without(self.arrays, names),
            objects=without(self.objects, names),
        )
        return self.select(*names), rest

    def rename(self, names: Mapping[str, str]) -> Batch:
        """Gives columns other names.

        Args:
          names: From the old to the new.

        Raises:
          ValueError: If there are no such columns, or two would have one name.
        """
        self._check_names("rename", list(names))
        arrays = [(names.get(k, k), column) for k, column in self.arrays.items()]
        objects = [(names.get(k, k), column) for k, column in self.objects.items()]
        renamed = [name for name, _ in arrays + objects]
        if doubles := sorted({n for n in renamed if renamed.count(n) > 1}):
            raise ValueError(f"rename: two columns would be named {doubles}.")
        return dataclasses.replace(self, arrays=dict(arrays), objects=dict(objects))

    def union(self, other: Batch) -> Batch:
        """The columns and meta of both.

        Raises:
          ValueError: If they have other numbers of rows, or of one name not the same
            value; NaN is the same as NaN.
        """
        if len(self) != len(other):
            raise ValueError(f"union of {len(self)} rows with {len(other)}.")
        return Batch(
            merged("union", self.arrays, other.arrays),
            merged("union", self.objects, other.objects),
            merged("union", self.meta, other.meta),
        )

    def reorder(self, order: Sequence[int] | np.ndarray) -> Batch:
        """All rows, in another order.

        Args:
          order: Each row's number once; the first is the row that comes first.

        Raises:
          ValueError: If it is no order of the rows.
        """
        if sorted(np.asarray(order).tolist()) != list(range(len(self))):
            raise ValueError(
                f"reorder takes each number from 0 to {len(self) - 1} once; to pick or "
                "to repeat rows, index the batch."
            )
        return self[np.asarray(order, np.int64)]

    def repeat(self, times: int | Sequence[int], *, interleave: bool = True) -> Batch:
        """Each row several times.

        Args:
          times: How often; one number, or one for each row.
          interleave: The copies of a row stand together; else the whole batch is
            repeated, which one number alone can say.

        Raises:
          ValueError: If a number is below 0, or they are not one a row.
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
        """Batches of so many rows; the last has what is left.

        Raises:
          ValueError: If `num_rows` is below 1.
        """
        if num_rows < 1:
            raise ValueError(f"split into {num_rows} rows: at least 1.")
        starts = range(0, len(self), num_rows)
        return [self[start : start + num_rows] for start in starts]

    def chunk(self, num_chunks: int) -> list[Batch]:
        """So many batches of one size.

        Raises:
          ValueError: If the rows do not divide; `pad_to_divisor` makes them.
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
          The batch, and how many rows were added, for `unpad`.

        Raises:
          ValueError: If there is no row, or `divisor` is below 1.
        """
        if divisor < 1 or not len(self):
            raise ValueError(f"pad {len(self)} rows to a multiple of {divisor}.")
        added = -len(self) % divisor
        return self[np.arange(len(self) + added) % len(self)], added

    def unpad(self, added: int) -> Batch:
        """Takes away what `pad_to_divisor` added.

        Raises:
          ValueError: If there are not so many rows.
        """
        if not 0 <= added < max(len(self), 1):
            raise ValueError(f"unpad takes {added} from {len(self)} rows.")
        return self[: len(self) - added]

    def iterate(
        self, num_rows: int, *, epochs: int = 1, seed: int | None = None
    ) -> Iterator[Batch]:
        """Batches of so many rows, over and over.

        Args:
          num_rows: Of each; it divides the rows of this batch.
          epochs: How often each row comes.
          seed: Rows are shuffled, anew in each epoch; None: they come in order.

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
    """Takes rows of a column."""

    numbers: np.ndarray

    def __call__(self, column: Any) -> Any:
        return column[self.numbers]


@dataclasses.dataclass(frozen=True, eq=False)
class _Aside:
    """What a batch holds besides arrays, as the static part of a pytree."""

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
    batch = object.__new__(Batch)  # unchecked: jax also puts other things in its leaves
    object.__setattr__(batch, "arrays", dict(zip(names, children, strict=True)))
    object.__setattr__(batch, "objects", aside.objects)
    object.__setattr__(batch, "meta", aside.meta)
    return batch


jax.tree_util.register_pytree_with_keys(Batch, _flatten, _unflatten)
