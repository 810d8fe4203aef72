"""Changes of the weights since the last hand-over, found shard by shard."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import DTypeLike, Int64

from bridge._box import Box, complete, overlap, relative, take, whole
from bridge.handover._checksum import bits_of, checksum, checksum_of_box, updated
from bridge.handover._named_tensors import prepare
from bridge.handover._positions import within
from bridge.models import DecoderConfig
from bridge.rules._piece import Piece
from bridge.streaming._files import Entries
from bridge.streaming._processes import agreeing

HostShards = dict[Box, np.ndarray]
"""Shards of a leaf that this process owns, by their boxes, in the dtype to send."""


@dataclasses.dataclass(frozen=True, eq=False)
class WeightSnapshot:
    """Weights as a rollout engine has them: the shards of this process, on the host.

    Attributes:
      config: Config of the model.
      dtype: Floating dtype to send; None for those of the leaves.
      entries: Shape and dtype of each tensor.
      shards: Shards of each leaf. Of replicas, one process has one.
      checksums: Checksum of each tensor, of all processes.
    """

    config: DecoderConfig
    dtype: DTypeLike | None
    entries: Entries
    shards: Mapping[str, HostShards]
    checksums: Mapping[str, int]


@dataclasses.dataclass(frozen=True, eq=False)
class TensorChanges:
    """Elements of a tensor that have other bits than before.

    Attributes:
      name: HF name.
      shape: Shape of the tensor.
      positions: Positions in the flat tensor, ascending.
      values: New elements, in the dtype of the tensor.
      before: Checksum of the tensor before.
      after: Checksum of the tensor with the changes.
    """

    name: str
    shape: tuple[int, ...]
    positions: Int64[np.ndarray, " changed"]
    values: np.ndarray
    before: int
    after: int


def snapshot_weights(
    params: Any, config: DecoderConfig, *, dtype: DTypeLike | None = None
) -> WeightSnapshot:
    """Copies the weights that an engine has to the host, to find what changes.

    Each process keeps its own shards, in the dtype that is sent: in bfloat16, 2 bytes
    for each of its elements. In a job of several processes all of them call it.

    Args:
      params: Weights that `send_weights` has sent, or that the engine has loaded.
      config: Config of the model.
      dtype: Floating dtype to send, as for `send_weights`.

    Raises:
      ValueError: If tree and config do not fit.

    Examples:
      >>> sent = bridge.handover.snapshot_weights(params, config, dtype="bfloat16")
      >>> changes, sent = bridge.handover.changed_weights(sent, params)
      >>> len(changes)
      0
    """
    with agreeing():
        entries, pieces, leaves = prepare(params, config, dtype)
        by_leaf = _by_leaf(pieces)
        shards = {
            path: _host_shards(leaves[path], entries[parts[0].source][1])
            for path, parts in by_leaf.items()
        }
    mine = dict.fromkeys(entries, 0)
    for piece, part, box, shard in _sections(by_leaf, shards):
        bits = bits_of(np.ascontiguousarray(take(shard, relative(part, box))))
        inner = part[len(piece.position) :]
        constant, numbers = within(piece, inner)
        shape = tuple(map(len, numbers))
        found = checksum_of_box(constant, numbers, bits.reshape(shape))
        mine[piece.source] = updated(mine[piece.source], 0, found)
    return WeightSnapshot(config, dtype, entries, shards, _summed(mine))


def changed_weights(
    snapshot: WeightSnapshot, params: Any
) -> tuple[list[TensorChanges], WeightSnapshot]:
    """Finds the elements whose bits differ from those of a snapshot.

    Each process compares its own shards, and only changes are gathered: every process
    gets those of all. Equal bits are equal values, so that an engine which applies the
    changes has the weights exactly; there is no threshold.

    Args:
      snapshot: Weights of the engine.
      params: Weights of now, sharded as they were.

    Returns:
      Changes of the tensors that have any, in the order of their names in the
      checkpoint, and the snapshot to continue with when the engine has them.

    Raises:
      ValueError: If the tree does not fit, or is sharded otherwise than before.
    """
    with agreeing():
        entries, pieces, leaves = prepare(params, snapshot.config, snapshot.dtype)
        by_leaf = _by_leaf(pieces)
        now = {
            path: _host_shards(leaves[path], entries[parts[0].source][1])
            for path, parts in by_leaf.items()
        }
        _check_same(snapshot, entries, now)
    found: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    mine = dict.fromkeys(entries, 0)
    for piece, part, box, shard in _sections(by_leaf, now):
        where = relative(part, box)
        new, old = (
            take(shard, where),
            take(snapshot.shards[piece.destination][box], where),
        )
        positions, values, before = _differences(piece, part, new, old)
        if len(positions):
            found.setdefault(piece.source, []).append((positions, values))
            old_sum, new_sum = (
                checksum(positions, bits_of(x)) for x in (before, values)
            )
            mine[piece.source] = updated(mine[piece.source], old_sum, new_sum)
    moved = _summed(mine)
    after = {
        name: updated(total, 0, moved[name])
        for name, total in snapshot.checksums.items()
    }
    changes = []
    for name, (shape, dtype) in entries.items():
        # Collective: every process visits all tensors in the same order.
        positions, values = _gathered(found.get(name, []), dtype)
        if len(positions):
            sums = snapshot.checksums[name], after[name]
            changes.append(TensorChanges(name, shape, positions, values, *sums))
    return changes, dataclasses.replace(snapshot, shards=now, checksums=after)


def _by_leaf(pieces: Mapping[str, list[Piece]]) -> dict[str, list[Piece]]:
    found: dict[str, list[Piece]] = {}
    for parts in pieces.values():
        for piece in parts:
            found.setdefault(piece.destination, []).append(piece)
    return found


def _host_shards(leaf: Any, dtype: np.dtype) -> HostShards:
    """Copies the shards that this process owns; a view would change with donation."""
    if not isinstance(leaf, jax.Array):
        mine = jax.process_index() == 0
        return {whole(leaf.shape): np.array(leaf, dtype)} if mine else {}
    return {
        complete(shard.index, leaf.shape): np.array(shard.data).astype(dtype)
        for shard in leaf.addressable_shards
        if shard.replica_id == 0
    }


def _sections(
    by_leaf: Mapping[str, list[Piece]], shards: Mapping[str, HostShards]
) -> Iterator[tuple[Piece, Box, Box, np.ndarray]]:
    """Yields each part of a shard that is part of a tensor, and the shard."""
    for path, parts in by_leaf.items():
        for box, shard in shards[path].items():
            for piece in parts:
                if (part := overlap(box, piece.destination_box)) is not None:
                    yield piece, part, box, shard


def _differences(
    piece: Piece, part: Box, new: np.ndarray, old: np.ndarray
) -> tuple[Int64[np.ndarray, " changed"], np.ndarray, np.ndarray]:
    """Returns positions in the tensor of other bits, and elements now and before."""
    stacked = len(piece.position)
    new, old = (np.ascontiguousarray(x).reshape(x.shape[stacked:]) for x in (new, old))
    differs = np.atleast_1d(bits_of(new) != bits_of(old))
    constant, numbers = within(piece, part[stacked:])
    positions = np.full(np.count_nonzero(differs), constant, np.int64)
    for each, index in zip(numbers, np.nonzero(differs), strict=False):
        positions += each[index]
    return positions, np.atleast_1d(new)[differs], np.atleast_1d(old)[differs]


def _gathered(
    parts: list[tuple[np.ndarray, np.ndarray]], dtype: np.dtype
) -> tuple[Int64[np.ndarray, " changed"], np.ndarray]:
    """Returns the changes of all shards of all processes, by position."""
    empty = (np.zeros(0, np.int64), np.zeros(0, dtype))
    positions, values = (
        np.concatenate(each) for each in zip(empty, *parts, strict=True)
    )
    if jax.process_count() > 1:
        positions, values = (_from_all(x) for x in (positions, values))
    order = np.argsort(positions)
    return positions[order], values[order]


def _from_all(array: np.ndarray) -> np.ndarray:
    """Concatenates arrays of other lengths of all processes, as bytes padded alike."""
    data = array.view(np.uint8).reshape(-1)
    sizes = _from_each(data.size)
    padded = np.zeros(max(sizes), np.uint8)
    padded[: data.size] = data
    rows = np.asarray(multihost_utils.process_allgather(padded)).reshape(len(sizes), -1)
    joined = [row[:size] for row, size in zip(rows, sizes, strict=True)]
    return np.concatenate(joined).view(array.dtype)


def _summed(mine: Mapping[str, int]) -> dict[str, int]:
    """Sums checksums over processes."""
    if jax.process_count() == 1:
        return dict(mine)
    rows = _numbers_of_all(list(mine.values()))
    sums = [sum(each) for each in zip(*rows, strict=True)]
    return {name: x % (1 << 64) for name, x in zip(mine, sums, strict=True)}


def _from_each(number: int) -> list[int]:
    """Returns a number of each process."""
    return [row[0] for row in _numbers_of_all([number])]


def _numbers_of_all(mine: list[int]) -> list[list[int]]:
    """Returns the numbers of each process, which are below `2 ** 64`."""
    # As halves: jax has no 64-bit integers unless asked for.
    halves = np.array([divmod(x, 1 << 32) for x in mine], np.uint32)
    rows = np.asarray(multihost_utils.process_allgather(halves)).tolist()
    return [[high << 32 | low for high, low in row] for row in rows]


def _check_same(
    snapshot: WeightSnapshot, entries: Entries, now: Mapping[str, HostShards]
) -> None:
    wrong = [
        f"{name} was {snapshot.entries.get(name)} and is {entry}"
        for name, entry in entries.items()
        if snapshot.entries.get(name) != entry
    ]
    wrong += [
        f"{path} is sharded otherwise than in the snapshot"
        for path, shards in now.items()
        if snapshot.shards.get(path, {}).keys() != shards.keys()
    ]
    if wrong:
        raise ValueError(
            "These weights are not those of the snapshot: "
            + "; ".join(wrong)
            + ". Send all with send_weights, and take another snapshot."
        )
