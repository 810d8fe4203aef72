"""The pieces of an array that devices send each other, as boxes; pure arithmetic."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from fsdp_jax._box import Box, full_box, num_elements, overlap
from fsdp_jax.sharding._chunks import Chunk, chunks


@dataclasses.dataclass(frozen=True)
class Piece:
    """A box that one device copies to another, or to another place in its own memory.

    Attributes:
      source: Device that reads it.
      target: Device that writes it.
      read_at: Offsets in the shard of the source.
      write_at: Offsets in the shard of the target.
      sizes: Size of each dim.
    """

    source: Any
    target: Any
    read_at: tuple[int, ...]
    write_at: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    @property
    def is_sent(self) -> bool:
        """Whether another device than the source receives it."""
        return self.source != self.target


def pieces_between(
    before: jax.ShapeDtypeStruct | jax.Array,
    after: jax.ShapeDtypeStruct,
    shape: Sequence[int],
    max_elements: int,
) -> list[Piece]:
    """Lists the pieces that make the shards of `after` of those of `before`.

    A target that holds a box itself copies it; otherwise a device of its process sends
    it, if one has it, and among several the one that has sent the least.

    Args:
      before: Array in its padded shape, with its sharding.
      after: Abstract array in its padded shape, with its sharding.
      shape: Logical shape: padding behind it is neither read nor written.
      max_elements: Size of a piece, at most.

    Returns:
      Pieces, target by target. Together they cover the logical part of each shard of
      `after` once.
    """
    holders: dict[Box, list[Any]] = defaultdict(list)
    for chunk in chunks(before):
        holders[chunk.box].append(chunk.device)
    logical = full_box(shape)
    sent: Counter[Any] = Counter()
    found = []
    for chunk in chunks(after):
        wanted = overlap(chunk.box, logical)
        if wanted is None:
            continue
        for box, devices in holders.items():
            part = overlap(wanted, box)
            if part is None:
                continue
            source = _choose(devices, chunk.device, sent)
            sent[source] += num_elements(part)
            for small in _divided(part, max_elements):
                found.append(_piece(source, box, chunk, small))
    return found


def in_rounds(pieces: Iterable[Piece]) -> list[list[Piece]]:
    """Groups pieces of one shape so that a device reads and writes one in each round.

    So each round is one program on all devices, and needs the memory of two pieces.
    """
    rounds: list[list[Piece]] = []
    open_to: dict[tuple[str, Any, tuple[int, ...]], int] = {}
    by_shape: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for piece in _by_distance(pieces):
        ends = [("read", piece.source), ("write", piece.target)]
        # No earlier round of this shape than the last one that either end takes part
        # in, plus one: pieces of a pair stay in order.
        first = max(open_to.get((*end, piece.sizes), 0) for end in ends)
        numbers = by_shape[piece.sizes]
        if first == len(numbers):
            numbers.append(len(rounds))
            rounds.append([])
        rounds[numbers[first]].append(piece)
        for end in ends:
            open_to[(*end, piece.sizes)] = first + 1
    return rounds


def _by_distance(pieces: Iterable[Piece]) -> list[Piece]:
    """Sorts pieces so that all devices of one distance follow each other.

    In this order n devices that each send to all need n rounds, not 2 n - 1.
    """
    pieces = list(pieces)
    count = 1 + max((max(p.source.id, p.target.id) for p in pieces), default=0)
    return sorted(pieces, key=lambda p: (p.target.id - p.source.id) % count)


def is_same_place(
    before: jax.ShapeDtypeStruct | jax.Array, after: jax.ShapeDtypeStruct
) -> bool:
    """Returns whether each device has the same part before and after."""
    return before.shape == after.shape and {
        chunk.device: chunk.box for chunk in chunks(before)
    } == {chunk.device: chunk.box for chunk in chunks(after)}


def _choose(devices: Sequence[Any], target: Any, sent: Counter[Any]) -> Any:
    if target in devices:
        return target
    near = [d for d in devices if d.process_index == target.process_index]
    return min(near or devices, key=lambda device: (sent[device], device.id))


def _piece(source: Any, held: Box, chunk: Chunk, part: Box) -> Piece:
    starts = [start for start, _ in part]
    return Piece(
        source,
        chunk.device,
        tuple(s - start for s, (start, _) in zip(starts, held, strict=True)),
        tuple(s - start for s, start in zip(starts, chunk.offsets, strict=True)),
        tuple(stop - start for start, stop in part),
    )


def _divided(box: Box, max_elements: int) -> list[Box]:
    """Divides a box along its first dims until each part is small enough."""
    if num_elements(box) <= max_elements:
        return [box]
    dim = next(d for d, (start, stop) in enumerate(box) if stop - start > 1)
    start, stop = box[dim]
    step = max(1, (stop - start) * max_elements // num_elements(box))
    cuts = [*range(start, stop, step), stop]
    parts = [(*box[:dim], pair, *box[dim + 1 :]) for pair in itertools.pairwise(cuts)]
    return [small for part in parts for small in _divided(part, max_elements)]
