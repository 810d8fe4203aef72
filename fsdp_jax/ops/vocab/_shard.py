"""Execution per part of a vocabulary, split over a mesh axis or not split."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int

from fsdp_jax._tree import PyTree


@dataclasses.dataclass(frozen=True)
class Part:
    """The part of a vocabulary that code on one rank sees.

    Attributes:
      axis: Mesh axis over which the vocabulary is split, manual there; None if the part
        is the whole vocabulary.
      vocab_size: Number of entries of the whole vocabulary that count. Those after them
        are padding.
    """

    axis: str | None
    vocab_size: int

    def first(self, size: int) -> Int[Array, ""]:
        """Returns the index in the whole vocabulary where this part starts."""
        rank = lax.axis_index(self.axis) if self.axis else 0
        return jnp.int32(rank * size)

    def max(self, x: Array) -> Array:
        """Returns the maximum over ranks. It has no gradient."""
        x = lax.stop_gradient(x)
        return lax.pmax(x, self.axis) if self.axis else x

    def sum(self, xs: PyTree) -> PyTree:
        """Returns sums over ranks; never pass bfloat16, on which XLA:CPU crashes."""
        return lax.psum(xs, self.axis) if self.axis else xs


def on_each_part(
    local: Callable[..., Array],
    arrays: Sequence[Array],
    vocab_dims: Sequence[int | None],
    *,
    axis: str,
    vocab_size: int | None,
) -> Array:
    """Runs `local(part, *arrays)` on each rank's part of the vocabulary.

    Inside a `shard_map` with `axis` manual the arrays are such parts already. Where a
    mesh has `axis` and the axis is automatic, as in a training step, a `shard_map` over
    that axis alone splits them: if left to XLA, logits might be gathered or not.
    Otherwise there is one part.

    Args:
      local: Function whose result is the same on all ranks.
      arrays: Arguments of `local` after the part.
      vocab_dims: Vocabulary dim of each array; None for an array without one.
      axis: Mesh axis that splits the vocabulary.
      vocab_size: Number of entries that count; None for all.

    Returns:
      The result of `local`.

    Raises:
      ValueError: If the vocabulary does not divide, or is smaller than `vocab_size`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    is_manual, ranks = axis in mesh.manual_axes, mesh.shape.get(axis, 1)
    dim, array = next(
        (d, a) for d, a in zip(vocab_dims, arrays, strict=True) if d is not None
    )
    entries = array.shape[dim] * (ranks if is_manual else 1)
    counted = entries if vocab_size is None else vocab_size
    _check(entries, counted, ranks, axis)
    if is_manual or ranks == 1:
        return local(Part(axis if is_manual else None, counted), *arrays)
    split = [d is not None for d in vocab_dims]

    def on_part(*arrays):
        seen = [
            a if s else _with_wide_gradient(a, axis)
            for s, a in zip(split, arrays, strict=True)
        ]
        return local(Part(axis, counted), *seen)

    specs = tuple(_spec(*pair, axis) for pair in zip(arrays, vocab_dims, strict=True))
    # check_vma (the default) inserts a psum only for gradients of replicated arguments:
    # those of logits are never communicated.
    return jax.shard_map(
        on_part, in_specs=specs, out_specs=PartitionSpec(), axis_names={axis}
    )(*arrays)


def _with_wide_gradient(x: Array, axis: str) -> Array:
    """Marks `x` as varying over `axis` in float32, so that gradients sum in float32."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return lax.pcast(wide, axis, to="varying").astype(x.dtype)


def _spec(x: Array, vocab_dim: int | None, axis: str) -> PartitionSpec:
    dims: list[str | None] = [None] * x.ndim
    if vocab_dim is not None:
        dims[vocab_dim] = axis
    return PartitionSpec(*dims)


def _check(entries: int, counted: int, ranks: int, axis: str) -> None:
    if entries % ranks:
        more = -entries % ranks
        raise ValueError(
            f"A vocabulary of {entries} does not divide over {ranks} ranks of "
            f"'{axis}'. Pad it by {more} to {entries + more} and pass "
            f"vocab_size={counted}, so that the padding is ignored."
        )
    if not 0 < counted <= entries:
        raise ValueError(
            f"vocab_size={counted}, but there are logits for {entries} entries. It is "
            "the number of leading entries that are not padding."
        )
