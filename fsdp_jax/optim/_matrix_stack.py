"""Matrices of several parameters in one stack, whole ones on each device, and back."""

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


@dataclasses.dataclass(frozen=True)
class Member:
    """One parameter of a stack, or what belongs to its matrices, as it lies at rest.

    Attributes:
      name: Dotted path of the parameter.
      shape: Logical shape: dims that count matrices, then those of each.
      padded_shape: The shape in which it is split.
      split: For each dim the mesh axes that split it.
    """

    name: str
    shape: tuple[int, ...]
    padded_shape: tuple[int, ...]
    split: tuple[tuple[str, ...], ...]

    @property
    def spec(self) -> PartitionSpec:
        """The spec at rest."""
        return _spec(self.split)

    def with_tail(self, tail: tuple[int, ...]) -> Member:
        """What has `tail` in the place of each matrix: split where matrices are."""
        if tail == self.shape[-2:]:
            return self
        return Member(
            self.name,
            (*self.shape[:-2], *tail),
            (*self.padded_shape[:-2], *tail),
            (*self.split[:-2], *[()] * len(tail)),
        )


@dataclasses.dataclass(frozen=True)
class Deal:
    """How the matrices of parameters become one stack `[matrices, rows, cols]`.

    Each device first lays out what it has of all members, one behind the other, with
    zeros behind the last, so that `owners` divide them. Where the rows or columns of a
    matrix are split, an all-to-all over their axes then makes matrices whole: each
    device gives away all pieces but those of its own matrices. So the stack is split by
    the axes of the counting dims first, then by those of rows, then of columns.

    Attributes:
      mesh: The device mesh.
      members: The parameters, all of the same last two dims, split alike.
    """

    mesh: Mesh
    members: tuple[Member, ...]

    @property
    def matrix(self) -> tuple[int, ...]:
        """Rows and columns."""
        return self.members[0].shape[-2:]

    @property
    def lead(self) -> tuple[str, ...]:
        """Axes that split the counting dims of the members: experts, stages."""
        return sum(self.members[0].split[:-2], ())

    @property
    def moves(self) -> tuple[tuple[int, tuple[str, ...]], ...]:
        """Split dims of a matrix, as dims of the stack, with their axes."""
        split = enumerate(self.members[0].split[-2:], start=1)
        return tuple((dim, axes) for dim, axes in split if axes)

    @property
    def owners(self) -> tuple[str, ...]:
        """Axes among whose devices the matrices are dealt out."""
        return sum((axes for _, axes in self.moves), ())

    @property
    def spec(self) -> PartitionSpec:
        """The spec of the stack."""
        return _spec([(*self.lead, *self.owners)])

    @property
    def num_matrices(self) -> int:
        """Of the stack, zeros included."""
        lead, owners = self._num_devices(self.lead), self._num_devices(self.owners)
        count = sum(math.prod(m.padded_shape[:-2]) for m in self.members) // lead
        return lead * -(-count // owners) * owners

    def _num_devices(self, axes: Sequence[str]) -> int:
        return math.prod(self.mesh.shape[axis] for axis in axes)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("value",), meta_fields=("deal",)
)
@dataclasses.dataclass(frozen=True)
class Dealt(WholeLeaf):
    """An array of optimizer state that is stacked as the matrices of a `Deal` are.

    It knows whose matrices it has, so that a checkpoint can hold it by parameter.

    Attributes:
      value: `[matrices, ...]`, or its `jax.ShapeDtypeStruct`.
      deal: Whose matrices, in which order.
    """

    value: Any
    deal: Deal

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the stack."""
        return tuple(self.value.shape)

    @property
    def dtype(self) -> Any:
        """The dtype of its elements."""
        return self.value.dtype

    @property
    def sharding(self) -> Any:
        """How the stack is split."""
        return self.value.sharding

    @property
    def members(self) -> tuple[Member, ...]:
        """What of it belongs to each parameter."""
        return tuple(m.with_tail(self.shape[1:]) for m in self.deal.members)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The stack on the host."""
        return np.asarray(self.value, dtype=dtype)

    def abstract(self) -> Dealt:
        """Its mould, split as it is to rest."""
        sharding = NamedSharding(self.deal.mesh, self.deal.spec)
        value = jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=sharding)
        return dataclasses.replace(self, value=value)

    def by_member(self) -> list[Any]:
        """What belongs to each parameter, padded and split as that rests; or moulds."""
        kind = getattr(getattr(self.value, "sharding", None), "memory_kind", None)
        shardings = [
            NamedSharding(self.deal.mesh, member.spec, memory_kind=kind)
            for member in self.members
        ]
        if isinstance(self.value, jax.ShapeDtypeStruct):
            return [
                jax.ShapeDtypeStruct(m.padded_shape, self.dtype, sharding=sharding)
                for m, sharding in zip(self.members, shardings, strict=True)
            ]
        # Through the device's memory, where collectives are, and back to where it was.
        here = jax.device_put(self.value, NamedSharding(self.deal.mesh, self.deal.spec))
        return jax.device_put(_bring_back(self.deal, here), shardings)

    def filled(self, pieces: Sequence[Any]) -> Dealt:
        """The inverse of `by_member`: this with other values."""
        here = [
            jax.device_put(piece, NamedSharding(self.deal.mesh, member.spec))
            for piece, member in zip(pieces, self.members, strict=True)
        ]
        stack = jax.device_put(_deal_out(self.deal, here), self.sharding)
        return dataclasses.replace(self, value=stack)


def deal_out(deal: Deal, pieces: Sequence[Array]) -> Array:
    """Stacks what belongs to the matrices of each member; inside or outside of jit.

    Args:
      deal: Whose matrices.
      pieces: In the padded shapes of its members, of one tail.

    Returns:
      Shape `[matrices, ...]`; whole matrices are in their logical shape.
    """
    tail = pieces[0].shape[len(deal.members[0].shape) - 2 :]
    is_matrix = tail == deal.members[0].padded_shape[-2:]
    tail = deal.matrix if is_matrix else tail
    members = [member.with_tail(tail) for member in deal.members]

    def local(*pieces):
        flat = jnp.concatenate([p.reshape(-1, *p.shape[-len(tail) :]) for p in pieces])
        flat = _pad(flat, 0, -len(flat) % deal._num_devices(deal.owners))
        if not is_matrix:
            return _own(flat, deal)
        for dim, axes in deal.moves:
            flat = lax.all_to_all(flat, axes, split_axis=0, concat_axis=dim, tiled=True)
        return flat[:, : tail[0], : tail[1]]

    return _over_mesh(deal, local, tuple(m.spec for m in members), deal.spec)(*pieces)


def bring_back(deal: Deal, stack: Array) -> list[Array]:
    """The inverse of `deal_out`."""
    tail = stack.shape[1:]
    members = [member.with_tail(tail) for member in deal.members]
    lead = deal._num_devices(deal.lead)
    counts = [math.prod(m.padded_shape[:-2]) // lead for m in deal.members]

    def local(stack):
        if tail != deal.matrix:
            if deal.owners:
                stack = lax.all_gather(stack, deal.owners, tiled=True)
        else:
            stack = _scattered(deal, stack)
        ends = np.cumsum(counts)
        parts = jnp.split(stack[: ends[-1]], ends[:-1].tolist())
        return [
            part.reshape(*_local_shape(deal, member)[: -len(tail)], *part.shape[1:])
            for part, member in zip(parts, members, strict=True)
        ]

    return _over_mesh(deal, local, deal.spec, [m.spec for m in members])(stack)


_deal_out = jax.jit(deal_out, static_argnums=0)
_bring_back = jax.jit(bring_back, static_argnums=0)


def _scattered(deal: Deal, stack: Array) -> Array:
    """Own matrices, cut up and given to all who have a piece of them."""
    padded = deal.members[0].padded_shape[-2:]
    for dim, size in enumerate(padded, start=1):
        stack = _pad(stack, dim, size - stack.shape[dim])
    for dim, axes in reversed(deal.moves):
        stack = lax.all_to_all(stack, axes, split_axis=dim, concat_axis=0, tiled=True)
    return stack


def _own(flat: Array, deal: Deal) -> Array:
    """Of what all owners have alike, the part of this one."""
    if not deal.owners:
        return flat
    size = len(flat) // deal._num_devices(deal.owners)
    start = lax.axis_index(deal.owners) * size
    return lax.dynamic_slice_in_dim(flat, start, size)


def _local_shape(deal: Deal, member: Member) -> tuple[int, ...]:
    pairs = zip(member.padded_shape, member.split, strict=True)
    return tuple(size // deal._num_devices(axes) for size, axes in pairs)


def _pad(x: Array, dim: int, zeros: int) -> Array:
    return jnp.pad(x, [(0, zeros if d == dim else 0) for d in range(x.ndim)])


def _over_mesh(deal: Deal, local: Callable, in_specs: Any, out_specs: Any) -> Callable:
    # Over all axes, tp too: collectives over the others would lose a split that is
    # left to the partitioner.
    return jax.shard_map(
        local,
        mesh=deal.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,
    )


def _spec(split: Sequence[tuple[str, ...]]) -> PartitionSpec:
    # One axis as its name: jax takes P("x") and P(("x",)) for different specs.
    entries = [axes[0] if len(axes) == 1 else axes or None for axes in split]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)
