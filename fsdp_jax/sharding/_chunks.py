"""Placement of an array's parts on devices: listed, validated and split in place."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh
from jaxtyping import Array, Shaped

from fsdp_jax._box import Box, box_of, full_box, index_in, num_elements


@dataclasses.dataclass(frozen=True)
class Chunk:
    """The part of an array that one device holds.

    Attributes:
      device: Device that holds the part.
      offsets: Start of the part in each dim.
      sizes: Size of the part in each dim.
      replica_id: Position of the device among those that hold the same part, from 0. To
        write each part once, write those with `replica_id` 0.
    """

    device: Any
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    replica_id: int

    @property
    def index(self) -> tuple[slice, ...]:
        """Index of the part in the whole array: `whole[chunk.index]`."""
        return index_in(self.box)

    @property
    def box(self) -> Box:
        """`(start, stop)` of the part in each dim of the whole array."""
        pairs = zip(self.offsets, self.sizes, strict=True)
        return tuple((offset, offset + size) for offset, size in pairs)

    def __str__(self) -> str:
        return f"{self.device} {_show(self.box)}"


def chunks(array: Shaped[Array, "*shape"] | jax.ShapeDtypeStruct) -> tuple[Chunk, ...]:
    """Lists the part of an array that each device holds.

    Shape and sharding determine it, where PyTorch has to ask all ranks. So nothing is
    sent or allocated, and the devices of other processes are listed too.

    Args:
      array: Array outside of `jax.jit`, or abstract array, of any shape and sharding.

    Returns:
      One chunk per device, in the order of the sharding's devices.

    Raises:
      TypeError: If `array` is neither.
      ValueError: If it is an abstract array without devices, or whose dims the devices
        do not divide.

    Source: `Megatron-FSDP uneven_dtensor.py::gather_and_compute_chunk_metadata`
    """
    indices = _sharding(array).devices_indices_map(array.shape)
    copies: collections.Counter[Box] = collections.Counter()
    found = []
    for device, index in indices.items():
        box = box_of(index, array.shape)
        found.append(_chunk(device, box, copies[box]))
        copies[box] += 1
    return tuple(found)


def validate_chunks(shape: Sequence[int], chunks: Iterable[Chunk]) -> None:
    """Checks that chunks cover an array: each element once, except for replicas.

    Upstream only checks that some chunk contains the first and the last index of each
    dim, so a hole in the middle passes. Here every chunk must be inside the array, no
    two may overlap, and their volumes must add up, which together exclude holes.

    Args:
      shape: Shape of the whole array.
      chunks: Chunks of all devices. Equal chunks are replicas; empty ones are ignored.

    Raises:
      ValueError: If a chunk is out of bounds, two chunks overlap that are not replicas,
        or there is a gap; lists all of them, each part with its first device.

    Source: `Megatron-FSDP uneven_dtensor.py::validate_uneven_dtensor`
    """
    full = full_box(shape)
    distinct: dict[Box, Chunk] = {}
    for chunk in chunks:
        distinct.setdefault(chunk.box, chunk)
    problems = [
        f"{chunk} is out of bounds"
        for box, chunk in distinct.items()
        if not _is_within(box, full)
    ]
    boxes = [b for b in distinct if len(b) == len(full) and num_elements(b)]
    overlaps = _overlaps(boxes)
    problems += [f"{distinct[a]} overlaps {distinct[b]}" for a, b in overlaps]
    if problems or sum(map(num_elements, boxes)) != num_elements(full):
        problems += [f"no device holds {_show(gap)}" for gap in _gaps(full, boxes)]
    if problems:
        raise ValueError(
            f"The chunks do not make an array of shape {tuple(shape)}, in "
            f"{len(problems)} place(s):\n  " + "\n  ".join(problems) + "\nGive the "
            "chunks of every device, as fsdp_jax.sharding.chunks(array) lists them."
        )


def split_chunks(
    array: Shaped[Array, "*shape"], size_or_sections: int | Sequence[int], dim: int = 0
) -> list[list[tuple[Chunk, Shaped[Array, "*shape"]]]]:
    """Splits an array into sections, each given as its pieces on the devices.

    Every device slices its own shard; nothing is communicated, wherever the sections
    begin. A shard that lies inside one section is not copied: the piece is the shard
    itself, which is deleted when the array is donated.

    Args:
      array: Array of any shape and sharding.
      size_or_sections: Size of every section but the last, which may be smaller; or the
        sizes of all sections, which must add up to the dim. Same as in `torch.split`.
      dim: Dim to split; a negative one counts from the last.

    Returns:
      For each section its pieces on this process's devices: a chunk, with offsets
      relative to the section, and its data on the chunk's device. Devices without a
      part of the section are left out.

    Raises:
      TypeError: If `array` is not a `jax.Array` outside of `jax.jit`, or a size is not
        an integer.
      ValueError: If there is no such dim, or the sizes do not fit it.

    Source: `Megatron-FSDP uneven_dtensor.py::split_dtensor`
    """
    if isinstance(array, jax.ShapeDtypeStruct):
        raise TypeError(
            "split_chunks takes a jax.Array, not an abstract array "
            "(jax.ShapeDtypeStruct), which has nothing to cut. Fill it first, or use "
            "fsdp_jax.sharding.chunks(abstract)."
        )
    held = {chunk.device: chunk for chunk in chunks(array)}
    dim = _resolve_dim(array.shape, dim)
    sizes = _section_sizes(array.shape, size_or_sections, dim)
    ends = itertools.accumulate(sizes, initial=0)
    shards = [(held[shard.device], shard.data) for shard in array.addressable_shards]
    return [
        [piece for shard in shards for piece in _cut(*shard, start, stop, dim)]
        for start, stop in itertools.pairwise(ends)
    ]


def _sharding(array: Any) -> jax.sharding.Sharding:
    is_array = isinstance(array, jax.Array | jax.ShapeDtypeStruct)
    if not is_array or isinstance(array, Tracer):
        raise TypeError(
            f"A {type(array).__name__} has no chunks, since it lies on no devices. "
            "Give a jax.Array outside of jax.jit; jax.device_put(x, sharding) makes "
            "one."
        )
    sharding = array.sharding
    if sharding is None or isinstance(getattr(sharding, "mesh", None), AbstractMesh):
        raise ValueError(
            f"The abstract array of shape {array.shape} names no devices: its sharding "
            f"is {sharding}. Give it one over a mesh of devices."
        )
    return sharding


def _chunk(device: Any, box: Box, replica_id: int) -> Chunk:
    offsets = tuple(start for start, _ in box)
    return Chunk(device, offsets, tuple(b - a for a, b in box), replica_id)


def _cut(
    chunk: Chunk, data: Array, start: int, stop: int, dim: int
) -> list[tuple[Chunk, Array]]:
    """Returns a shard's piece of the section `[start, stop)` of `dim`: one or none."""
    box = list(chunk.box)
    offset, _ = box[dim]
    box[dim] = first, last = max(box[dim][0], start), min(box[dim][1], stop)
    if num_elements(box) <= 0:
        return []
    if last - first < chunk.sizes[dim]:
        data = jax.lax.slice_in_dim(data, first - offset, last - offset, axis=dim)
    box[dim] = first - start, last - start
    return [(_chunk(chunk.device, tuple(box), chunk.replica_id), data)]


def _resolve_dim(shape: tuple[int, ...], dim: int) -> int:
    if not -len(shape) <= dim < len(shape):
        raise ValueError(
            f"Cannot split dim {dim} of an array of shape {shape}: it has "
            f"{len(shape)} dims, counted from 0."
        )
    return dim % len(shape)


def _section_sizes(
    shape: tuple[int, ...], size_or_sections: int | Sequence[int], dim: int
) -> list[int]:
    total, asked = shape[dim], size_or_sections
    if isinstance(asked, Iterable):
        sizes = [operator.index(size) for size in asked]
        if sum(sizes) != total or min(sizes, default=0) < 0:
            raise ValueError(
                f"Cannot split dim {dim} of {shape} into sections of {sizes}: they add "
                f"up to {sum(sizes)}, not {total}, or one is negative. Change them."
            )
        return sizes
    size = operator.index(asked)
    if size < 1:
        raise ValueError(
            f"Cannot split dim {dim} of {shape} into sections of size {size}: use at "
            "least 1."
        )
    # An empty dim makes one empty section, as in torch.
    return [min(size, total - start) for start in range(0, max(total, 1), size)]


def _show(box: Box) -> str:
    return f"[{', '.join(f'{start}:{stop}' for start, stop in box)}]"


def _is_within(box: Box, outer: Box) -> bool:
    return len(box) == len(outer) and all(
        first <= start <= stop <= last
        for (start, stop), (first, last) in zip(box, outer, strict=True)
    )


def _overlaps(boxes: Sequence[Box]) -> list[tuple[Box, Box]]:
    """Returns the overlapping pairs; compares one box with all later ones at once."""
    starts = np.array([[start for start, _ in box] for box in boxes])
    stops = np.array([[stop for _, stop in box] for box in boxes])
    found = []
    for i, box in enumerate(boxes):
        first = np.maximum(starts[i], starts[i + 1 :])
        last = np.minimum(stops[i], stops[i + 1 :])
        later = np.flatnonzero((first < last).all(axis=-1))
        found += [(box, boxes[i + 1 + int(j)]) for j in later]
    return found


def _gaps(outer: Box, boxes: Iterable[Box]) -> list[Box]:
    """Returns the uncovered rest of `outer` as disjoint boxes."""
    left = [outer]
    for box in boxes:
        left = [part for gap in left for part in _subtract(gap, box)]
    return [gap for gap in left if num_elements(gap)]


def _subtract(box: Box, hole: Box) -> list[Box]:
    """Returns `box` without `hole` as disjoint boxes, dim by dim."""
    middle = tuple(
        (max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, hole, strict=True)
    )
    if not num_elements(middle):
        return [box]
    parts = []
    for dim, ((start, stop), (first, last)) in enumerate(zip(box, middle, strict=True)):
        for side in ((start, first), (last, stop)):
            parts.append((*middle[:dim], side, *box[dim + 1 :]))
    return [part for part in parts if num_elements(part)]
