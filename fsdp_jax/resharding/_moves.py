"""Moves between devices that a change of plan needs, computed leaf by leaf."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import jax

from fsdp_jax._report import Grid, format_bytes, html_page
from fsdp_jax.checkpoint._leaf_names import Leaf
from fsdp_jax.resharding._pieces import Piece, is_same_place, pieces_between
from fsdp_jax.sharding._chunks import chunks

_COLUMNS = {"leaf": "left", "shape": "right", "dtype": "left"} | dict.fromkeys(
    ("pieces", "bytes moved", "between processes"), "right"
)


@dataclasses.dataclass(frozen=True)
class LeafMove:
    """Bytes of one leaf that move.

    Attributes:
      name: Dotted name, as in a checkpoint.
      before: Array in its padded shape, with its sharding; a scalar as one element.
      after: Abstract array of the other plan, likewise.
      shape: Logical shape.
      pieces: Pieces that devices copy; empty if each has its part already.
    """

    name: str
    before: jax.ShapeDtypeStruct
    after: jax.ShapeDtypeStruct
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def bytes_moved(self) -> int:
        """Bytes that devices receive from others."""
        return self._bytes(*(p for p in self.pieces if p.is_sent))

    @property
    def bytes_between_processes(self) -> int:
        """Bytes of these that come from a device of another process."""
        return self._bytes(
            *(p for p in self.pieces if _process(p.source) != _process(p.target))
        )

    @property
    def bytes_received_here(self) -> int:
        """Bytes that the devices of this process receive from others."""
        here = jax.process_index()
        return self._bytes(
            *(p for p in self.pieces if p.is_sent and _process(p.target) == here)
        )

    @property
    def largest_piece(self) -> int:
        """Bytes of the largest piece."""
        return max((self._bytes(piece) for piece in self.pieces), default=0)

    def _bytes(self, *pieces: Piece) -> int:
        return sum(piece.size for piece in pieces) * self.after.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Moves:
    """Moves of a `reshard`; `print` shows a line a leaf, the bytes and the peak.

    Attributes:
      leaves: Leaves in the order in which they move.
      chunk_bytes: Bytes of a piece, at most, where one element is not more.
      donate: Whether each leaf is deleted when its copy is complete.

    Examples:
      >>> state = fsdp.init_state(plan, tx, params)
      >>> smaller_mesh = fsdp.make_mesh(devices=jax.devices()[:4])
      >>> other = fsdp.fully_shard(make_model, smaller_mesh, [fsdp.Stacked("layers")])
      >>> moves = fsdp.resharding.plan_moves(state, other, tx)
      >>> head = next(leaf for leaf in moves.leaves if leaf.name == "params.head")
      >>> head.bytes_moved  # 7 of 8 parts of [16, 16] float32: device 0 keeps its own
      896
    """

    leaves: tuple[LeafMove, ...]
    chunk_bytes: int
    donate: bool

    @property
    def bytes_moved(self) -> int:
        """Bytes that devices receive from others."""
        return sum(leaf.bytes_moved for leaf in self.leaves)

    @property
    def bytes_between_processes(self) -> int:
        """Bytes of these that come from a device of another process."""
        return sum(leaf.bytes_between_processes for leaf in self.leaves)

    @property
    def bytes_before(self) -> int:
        """Bytes of the state on the device that stores most of it."""
        return max(self._stored(before=True).values(), default=0)

    @property
    def bytes_after(self) -> int:
        """Bytes of the new state on the device that stores most of it."""
        return max(self._stored(before=False).values(), default=0)

    @property
    def peak_bytes(self) -> int:
        """Bytes on the fullest device while the state moves.

        The leaves that have not moved, those that have, and two pieces: one that is cut
        and one that is received. Without `donate` the old state stays beside the new.
        Leaves in host memory are counted as if they were on the device. Not counted: a
        `layer_wise` stack needs its own bytes twice more while it is split or joined.
        """
        live = self._stored(before=True)
        peak = Counter(live)
        for leaf in self.leaves:
            before, after = _per_device(leaf.before), _per_device(leaf.after)
            live += after
            for device in {*before, *after}:
                here = live[device] + 2 * leaf.largest_piece
                peak[device] = max(peak[device], here)
            if self.donate:
                live -= before
        return max(peak.values(), default=0)

    def __repr__(self) -> str:
        """Returns the table, then the sums."""
        return "\n".join([self._grid().as_text(), "", *self._summary()])

    def _repr_html_(self) -> str:
        """Returns the table as HTML, with a bar for the bytes of each leaf."""
        return html_page([self._grid(), *self._summary()])

    def _grid(self) -> Grid:
        rows = [
            (
                leaf.name,
                str(leaf.shape),
                str(leaf.after.dtype),
                f"{len(leaf.pieces):,}",
                f"{leaf.bytes_moved:,}",
                f"{leaf.bytes_between_processes:,}",
            )
            for leaf in self.leaves
        ]
        return Grid(_COLUMNS, rows, [leaf.bytes_moved for leaf in self.leaves])

    def _summary(self) -> list[str]:
        between = format_bytes(self.bytes_between_processes)
        which = "deleted as they move" if self.donate else "kept"
        return [
            f"leaves: {len(self.leaves)}, {which}, in pieces of at most "
            f"{format_bytes(self.chunk_bytes)}",
            f"moved between devices: {format_bytes(self.bytes_moved)}, of these "
            f"between processes: {between}",
            f"on the fullest device: {format_bytes(self.bytes_before)} before, at most "
            f"{format_bytes(self.peak_bytes)} meanwhile, "
            f"{format_bytes(self.bytes_after)} after",
        ]

    def _stored(self, *, before: bool) -> Counter[Any]:
        total: Counter[Any] = Counter()
        for leaf in self.leaves:
            total += _per_device(leaf.before if before else leaf.after)
        return total


def move_of(name: str, before: Leaf, after: Leaf, chunk_bytes: int) -> LeafMove:
    """Returns what moves of one leaf.

    Args:
      name: Name of the leaf.
      before: Leaf of the state.
      after: Leaf of the abstract state of the other plan.
      chunk_bytes: Bytes of a piece, at most.
    """
    old, new = at_least_1d(before.value), at_least_1d(after.value)
    shape = after.shape or (1,)
    pieces = []
    if not is_same_place(old, new):
        per_piece = max(1, chunk_bytes // new.dtype.itemsize)
        pieces = pieces_between(old, new, shape, per_piece)
    return LeafMove(name, old, new, after.shape, tuple(pieces))


def at_least_1d(value: Any) -> jax.ShapeDtypeStruct:
    """Returns the abstract array, a scalar as an array of one element."""
    return jax.ShapeDtypeStruct(
        value.shape or (1,), value.dtype, sharding=value.sharding
    )


def _per_device(leaf: jax.ShapeDtypeStruct) -> Counter[Any]:
    size = leaf.dtype.itemsize
    assert leaf.sharding is not None
    for dim in leaf.sharding.shard_shape(leaf.shape):
        size *= dim
    return Counter({chunk.device: size for chunk in chunks(leaf)})


def _process(device: Any) -> int:
    return device.process_index
