"""Tensors whose ranks' parts are in several files, merged lazily."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from bridge._box import Range, as_index, complete, shape_of
from bridge.formats._dtensor import LocalShard


@dataclasses.dataclass(frozen=True)
class RankShards:
    """Lazy tensor whose parts are on several ranks; copies are compared when read.

    Args:
      name: Name of the tensor, for error messages.
      copies: Parts of each replica in rank order; a replica fills the tensor along
        `dim`.
      dim: Dim along which the parts follow each other.
      shape: Shape of the tensor.
    """

    name: str
    copies: tuple[tuple[Any, ...], ...]
    dim: int
    shape: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the tensor as stored."""
        return self.copies[0][0].dtype

    def read(self, slices: tuple[slice, ...] = ()) -> np.ndarray:
        """Reads the tensor, or a box of it, from the parts that overlap the box.

        Raises:
          ValueError: If the bits of two replicas differ.
        """
        box = complete(slices, self.shape)
        first, *others = (self._read(parts, box) for parts in self.copies)
        bits = np.ascontiguousarray(first).reshape(-1).view(np.uint8)
        for number, other in enumerate(others, 1):
            theirs = np.ascontiguousarray(other).reshape(-1).view(np.uint8)
            if not np.array_equal(bits, theirs):
                raise ValueError(
                    f"'{self.name}' has {len(self.copies)} copies, and number {number} "
                    "differs from number 0: the ranks had drifted apart when this was "
                    "saved, or a file is of another step. No copy can be preferred."
                )
        return first

    def _read(self, parts: Sequence[Any], box: tuple[Range, ...]) -> np.ndarray:
        if not self.shape:
            return parts[0].read()
        found, start, wanted = [], 0, box[self.dim]
        for part in parts:
            stop = start + part.shape[self.dim]
            low, high = max(start, wanted.start), min(stop, wanted.stop)
            if low < high:
                index = list(as_index(box))
                index[self.dim] = slice(low - start, high - start)
                found.append(part.read(tuple(index)))
            start = stop
        if not found:
            return np.empty(shape_of(box), self.dtype)
        return found[0] if len(found) == 1 else np.concatenate(found, self.dim)


def merge_ranks(name: str, parts: Sequence[Any]) -> RankShards:
    """Merges what all ranks hold of one tensor.

    Args:
      name: Name of the tensor, for error messages.
      parts: `LocalShard` of each rank, or plain lazy tensors, which are copies: each
        rank has the same buffer.

    Raises:
      ValueError: If the ranks' dtypes, shapes or splits do not fit.
    """
    shards = [
        part if isinstance(part, LocalShard) else LocalShard(part, part.shape, None)
        for part in parts
    ]
    kinds = {(shard.shape, shard.dim, shard.local.dtype) for shard in shards}
    if len(kinds) > 1:
        raise ValueError(f"'{name}': its ranks say {sorted(map(str, kinds))}")
    shape, dim = shards[0].shape, shards[0].dim
    locals_ = [shard.local for shard in shards]
    size = 1 if dim is None else _replica_size(name, locals_, shape, dim)
    copies = tuple(
        tuple(locals_[start : start + size]) for start in range(0, len(locals_), size)
    )
    merged = RankShards(name, copies, dim or 0, shape)
    if dim is None and any(local.shape != shape for local in locals_):
        raise ValueError(f"'{name}' of shape {shape} has copies of other shapes")
    return merged


def _replica_size(
    name: str, parts: Sequence[Any], shape: tuple[int, ...], dim: int
) -> int:
    """Returns how many consecutive ranks hold one replica."""
    lengths = [part.shape[dim] for part in parts]
    rest = shape[:dim] + shape[dim + 1 :]
    fits = all(part.shape[:dim] + part.shape[dim + 1 :] == rest for part in parts)
    for size in range(1, len(parts) + 1):
        sums = [
            sum(lengths[start : start + size]) for start in range(0, len(parts), size)
        ]
        if fits and len(parts) % size == 0 and set(sums) == {shape[dim]}:
            return size
    raise ValueError(
        f"'{name}' of shape {shape} is split along dim {dim} in parts of {lengths}, "
        "which do not fill it"
    )
