"""Layout of a layer-wise optimizer's state: stacks of unsharded matrices (Muon)."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from fsdp_jax._tree import WholeLeaf
from fsdp_jax.sharding._param_split import spec_of_split


@dataclasses.dataclass(frozen=True)
class Member:
    """Stored layout of one parameter of a stack, or of state of its matrices.

    Attributes:
      name: Dotted path of the parameter.
      shape: Logical shape: dims that count matrices, then those of each matrix.
      padded_shape: Shape in which it is split.
      split: Mesh axes that split each dim.
    """

    name: str
    shape: tuple[int, ...]
    padded_shape: tuple[int, ...]
    split: tuple[tuple[str, ...], ...]

    @property
    def spec(self) -> PartitionSpec:
        """Stored spec."""
        return _spec(self.split)

    def with_tail(self, tail: tuple[int, ...]) -> Member:
        """Returns the layout of an array with dims `tail` in place of each matrix.

        It is split over the dims that count matrices only, unless `tail` is the matrix.
        """
        if tail == self.shape[-2:]:
            return self
        return Member(
            self.name,
            (*self.shape[:-2], *tail),
            (*self.padded_shape[:-2], *tail),
            (*self.split[:-2], *[()] * len(tail)),
        )


@dataclasses.dataclass(frozen=True)
class StackLayout:
    """Layout of several parameters' matrices as one stack `[matrices, rows, cols]`.

    Each device first concatenates its shards of all members, with zeros after the last,
    so that `owners` divide them. If the rows or columns of a matrix are split, an
    all-to-all over their axes then gathers unsharded matrices: each device sends all
    pieces except those of its own matrices. So the stack is split by the axes of the
    counting dims first, then by those of rows, then by those of columns.

    Example: 4 devices split the rows of `a` [3, 8, 16] and `b` [2, 8, 16], a0 to b1:

        each device concatenates    [5, 2, 16]   2 rows of a0 a1 a2 b0 b1
        pads, so that 4 divides     [8, 2, 16]   2 rows of a0 a1 a2 b0 b1 0 0 0
        all-to-all, dim 0 to 1      [2, 8, 16]   a0 a1 | a2 b0 | b1 0 | 0 0

    Each device updates two unsharded matrices, and the reverse returns the rows.

    With `fuller` the zeros lie otherwise: owners that are in it have one matrix more
    than the others, so that with fuller (1,) the device after the first has two of a0
    to b1, and a zero ends what each of the others has.

    Attributes:
      mesh: Device mesh.
      members: Parameters of the stack, all with the same last two dims and split.
      fuller: Owners with one matrix more than the others, in increasing order; None
        puts all zeros behind the last matrix.
    """

    mesh: Mesh
    members: tuple[Member, ...]
    fuller: tuple[int, ...] | None = None

    @property
    def matrix(self) -> tuple[int, ...]:
        """Rows and columns of a matrix."""
        return self.members[0].shape[-2:]

    @property
    def lead(self) -> tuple[str, ...]:
        """Axes that split the counting dims of the members: experts, stages."""
        return sum(self.members[0].split[:-2], ())

    @property
    def split_dims(self) -> tuple[tuple[int, tuple[str, ...]], ...]:
        """Split dims of a matrix, as dims of the stack, with their axes."""
        split = enumerate(self.members[0].split[-2:], start=1)
        return tuple((dim, axes) for dim, axes in split if axes)

    @property
    def owners(self) -> tuple[str, ...]:
        """Axes over whose devices unsharded matrices are distributed."""
        return sum((axes for _, axes in self.split_dims), ())

    @property
    def spec(self) -> PartitionSpec:
        """Spec of the stack."""
        return _spec([(*self.lead, *self.owners)])

    @property
    def count(self) -> int:
        """Number of matrices that the owners share, zero matrices excluded."""
        total = sum(math.prod(m.padded_shape[:-2]) for m in self.members)
        return total // self._num_devices(self.lead)

    @property
    def num_owners(self) -> int:
        """Number of devices over which unsharded matrices are distributed."""
        return self._num_devices(self.owners)

    @property
    def num_slots(self) -> int:
        """Number of matrices of each owner, zero matrices included."""
        return -(-self.count // self.num_owners)

    @property
    def num_owned(self) -> tuple[int, ...]:
        """Number of matrices of each owner, zero matrices excluded."""
        owners = range(self.num_owners)
        if self.fuller is None:
            slots = self.num_slots
            return tuple(min(max(self.count - i * slots, 0), slots) for i in owners)
        return tuple(self.count // self.num_owners + (i in self.fuller) for i in owners)

    @property
    def num_matrices(self) -> int:
        """Number of matrices in the stack, zero matrices included."""
        return self._num_devices(self.lead) * self.num_slots * self.num_owners

    def _num_devices(self, axes: Sequence[str]) -> int:
        return math.prod(self.mesh.shape[axis] for axis in axes)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("value",), meta_fields=("layout",)
)
@dataclasses.dataclass(frozen=True)
class MatrixStack(WholeLeaf):
    """Array of optimizer state that is stacked as the matrices of a `StackLayout` are.

    It carries its layout, so that a checkpoint can store it by parameter.

    Attributes:
      value: Array `[matrices, ...]`, or its `jax.ShapeDtypeStruct`.
      layout: Layout of the stack: its parameters and their order.
    """

    value: Any
    layout: StackLayout

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the stack."""
        return tuple(self.value.shape)

    @property
    def dtype(self) -> Any:
        """Dtype of its elements."""
        return self.value.dtype

    @property
    def sharding(self) -> Any:
        """Sharding of the stack."""
        return self.value.sharding

    @property
    def members(self) -> tuple[Member, ...]:
        """Stored layout of each parameter's part of it."""
        return tuple(m.with_tail(self.shape[1:]) for m in self.layout.members)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Returns the stack on the host."""
        return np.asarray(self.value, dtype=dtype)

    def abstract(self) -> MatrixStack:
        """Returns an abstract `MatrixStack` with the sharding in which it is stored."""
        sharding = NamedSharding(self.layout.mesh, self.layout.spec)
        value = jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=sharding)
        return dataclasses.replace(self, value=value)

    def by_member(self) -> list[Any]:
        """Returns each parameter's part, padded and split as stored.

        The parts of an abstract value are abstract.
        """
        kind = getattr(getattr(self.value, "sharding", None), "memory_kind", None)
        shardings = [
            NamedSharding(self.layout.mesh, member.spec, memory_kind=kind)
            for member in self.members
        ]
        if isinstance(self.value, jax.ShapeDtypeStruct):
            return [
                jax.ShapeDtypeStruct(m.padded_shape, self.dtype, sharding=sharding)
                for m, sharding in zip(self.members, shardings, strict=True)
            ]
        # Collectives run in device memory: the state may be stored on the host.
        here = jax.device_put(
            self.value, NamedSharding(self.layout.mesh, self.layout.spec)
        )
        return jax.device_put(_unstack_matrices(self.layout, here), shardings)

    def filled(self, pieces: Sequence[Any]) -> MatrixStack:
        """Returns a `MatrixStack` with other values: the inverse of `by_member`."""
        here = [
            jax.device_put(piece, NamedSharding(self.layout.mesh, member.spec))
            for piece, member in zip(pieces, self.members, strict=True)
        ]
        stack = jax.device_put(_stack_matrices(self.layout, here), self.sharding)
        return dataclasses.replace(self, value=stack)


def stack_matrices(layout: StackLayout, pieces: Sequence[Array]) -> Array:
    """Stacks the matrices of all members, or arrays that belong to them.

    Works inside and outside of jit.

    Args:
      layout: Layout of the stack.
      pieces: An array for each member, in its padded shape, with the same tail dims.

    Returns:
      The stack, `[matrices, ...]`; unsharded matrices have their logical shape.
    """
    tail = pieces[0].shape[len(layout.members[0].shape) - 2 :]
    is_matrix = tail == layout.members[0].padded_shape[-2:]
    tail = layout.matrix if is_matrix else tail
    members = [member.with_tail(tail) for member in layout.members]

    def local(*pieces):
        # [matrices of this device's shards, rows / r, cols / c]
        local_tail = pieces[0].shape[pieces[0].ndim - len(tail) :]
        flat = jnp.concatenate([p.reshape(-1, *local_tail) for p in pieces])
        flat = _with_zeros(layout, flat)
        # State of another shape than the matrix has none of `split_dims`: all owners
        # hold the same.
        if not is_matrix:
            return _own(flat, layout)
        for dim, axes in layout.split_dims:
            flat = lax.all_to_all(flat, axes, split_axis=0, concat_axis=dim, tiled=True)
        # [own matrices, rows, cols], with the padding of rows and cols cut off.
        return flat[:, : tail[0], : tail[1]]

    return _over_mesh(layout, local, tuple(m.spec for m in members), layout.spec)(
        *pieces
    )


def unstack_matrices(layout: StackLayout, stack: Array) -> list[Array]:
    """Returns each member's part of a stack: the inverse of `stack_matrices`."""
    tail = stack.shape[1:]
    members = [member.with_tail(tail) for member in layout.members]
    lead = layout._num_devices(layout.lead)
    counts = [math.prod(m.padded_shape[:-2]) // lead for m in layout.members]
    lead_dims = [len(m.shape) - 2 for m in layout.members]

    def local(stack):
        if tail != layout.matrix:
            if layout.owners:
                stack = lax.all_gather(stack, layout.owners, tiled=True)
        else:
            stack = _scattered(layout, stack)
        parts = jnp.split(
            _without_zeros(layout, stack), np.cumsum(counts)[:-1].tolist()
        )
        return [
            part.reshape(*_local_shape(layout, member)[:count], *part.shape[1:])
            for part, member, count in zip(parts, members, lead_dims, strict=True)
        ]

    return _over_mesh(layout, local, layout.spec, [m.spec for m in members])(stack)


_stack_matrices = jax.jit(stack_matrices, static_argnums=0)
_unstack_matrices = jax.jit(unstack_matrices, static_argnums=0)


def _with_zeros(layout: StackLayout, flat: Array) -> Array:
    """Adds zero matrices, so that all owners have equally many slots."""
    if layout.fuller is None or not layout.fuller:
        return _pad(flat, 0, -len(flat) % layout.num_owners)
    return _pad(flat, 0, 1)[_sources(layout)]


def _without_zeros(layout: StackLayout, stack: Array) -> Array:
    """Returns the matrices in their order: the inverse of `_with_zeros`."""
    if layout.fuller is None or not layout.fuller:
        return stack[: layout.count]
    sources = _sources(layout)
    return stack[np.argsort(sources, kind="stable")[: layout.count]]


def _sources(layout: StackLayout) -> np.ndarray:
    """Returns for each slot the number of its matrix; `count` for a zero matrix."""
    owned, slots = np.asarray(layout.num_owned), np.arange(layout.num_slots)
    numbers = (np.cumsum(owned) - owned)[:, None] + slots
    return np.where(slots < owned[:, None], numbers, layout.count).reshape(-1)


def _scattered(layout: StackLayout, stack: Array) -> Array:
    """Splits this device's matrices and exchanges the pieces for its shards."""
    padded = layout.members[0].padded_shape[-2:]
    for dim, size in enumerate(padded, start=1):
        stack = _pad(stack, dim, size - stack.shape[dim])
    # Reversed: the inverse of the all-to-alls in `stack_matrices`, last one first.
    for dim, axes in reversed(layout.split_dims):
        stack = lax.all_to_all(stack, axes, split_axis=dim, concat_axis=0, tiled=True)
    return stack


def _own(flat: Array, layout: StackLayout) -> Array:
    """Returns this owner's part of an array that all owners hold."""
    if not layout.owners:
        return flat
    size = len(flat) // layout.num_owners
    start = lax.axis_index(layout.owners) * size
    return lax.dynamic_slice_in_dim(flat, start, size)


def _local_shape(layout: StackLayout, member: Member) -> tuple[int, ...]:
    pairs = zip(member.padded_shape, member.split, strict=True)
    return tuple(size // layout._num_devices(axes) for size, axes in pairs)


def _pad(x: Array, dim: int, zeros: int) -> Array:
    return jnp.pad(x, [(0, zeros if d == dim else 0) for d in range(x.ndim)])


def _over_mesh(
    layout: StackLayout, local: Callable, in_specs: Any, out_specs: Any
) -> Callable:
    # Manual over all axes, tp too: collectives over some axes would lose a split over
    # those that are left to the partitioner.
    return jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,
    )


def _spec(split: Sequence[tuple[str, ...]]) -> PartitionSpec:
    return spec_of_split({dim: axes for dim, axes in enumerate(split) if axes})
