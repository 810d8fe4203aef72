"""Experts whose width XLA splits over a mesh axis, computed by each rank's part."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

Rows = Float[Array, "rows embed"]
Sizes = Int[Array, " experts"] | np.ndarray


class ExpertKernels(NamedTuple):
    """Weights of experts that a split of their width divides.

    Attributes:
      up: Kernel into the experts, `[experts, embed, 2, width]` with a gate and
        `[experts, embed, width]` without.
      up_bias: Its bias, `[experts, 2, width]`; None for none.
      down: Kernel back, `[experts, width, embed]`.
    """

    up: Array
    up_bias: Array | None
    down: Array


def is_split() -> bool:
    """Returns whether a mesh axis is automatic: the one of tensor parallelism."""
    return bool(_split_axes())


def split_axis(width: int) -> str | None:
    """Returns the mesh axis that `run_split` can split this width over.

    None if there is none. None too in pipeline stages: only some ranks run a stage at a
    time, and the copies and the sum of `run_split` wait for the others.
    """
    mesh, axes = jax.sharding.get_abstract_mesh(), _split_axes()
    if len(axes) != 1 or width % mesh.shape[axes[0]] or mesh.shape.get("pp", 1) > 1:
        return None
    return axes[0]


def _split_axes() -> list[str]:
    mesh = jax.sharding.get_abstract_mesh()
    return [axis for axis in mesh.auto_axes if mesh.shape[axis] > 1]


def run_split(
    run: Callable[[ExpertKernels, Rows, Sizes], Rows],
    axis: str,
    kernels: ExpertKernels,
    x: Rows,
    group_sizes: Sizes,
) -> Rows:
    """Runs each rank's part of the width of experts, and sums what they return.

    XLA would split a grouped product in blocks only with a collective a block, and a
    `ragged_dot`, for which it has no kernel on GPUs, by multiplying all rows by every
    matrix.

    Args:
      run: Function `run(kernels, x, group_sizes)` that computes experts of any width.
      axis: Mesh axis that splits the width, automatic here.
      kernels: Weights of the experts.
      x: Rows sorted by expert.
      group_sizes: Number of rows of each expert.
    """
    ranks = jax.sharding.get_abstract_mesh().shape[axis]
    whole = PartitionSpec()
    specs: Any = jax.tree.map(lambda kernel: _last(kernel, axis), kernels)
    specs = specs._replace(down=PartitionSpec(None, axis, None))
    by_rank = PartitionSpec(axis)
    is_static = isinstance(group_sizes, np.ndarray)

    def own(kernels: ExpertKernels, x: Array, sizes: Array | None) -> Array:
        return run(kernels, x[0], group_sizes if sizes is None else sizes)[None]

    # A copy a rank, and a sum behind: XLA then communicates at once, forward and
    # backward, where a sum inside would be a collective of its own, which XLA:CPU does
    # not have in 16 bits.
    copies = jnp.broadcast_to(x, (ranks, *x.shape))
    parts = jax.shard_map(
        own,
        in_specs=(specs, by_rank, None if is_static else whole),
        out_specs=by_rank,
        axis_names={axis},
        check_vma=False,
    )(kernels, copies, None if is_static else group_sizes)
    return lax.reduce(parts, jnp.zeros((), parts.dtype), lax.add, (0,))


def _last(x: Array, axis: str) -> PartitionSpec:
    return PartitionSpec(*(None,) * (x.ndim - 1), axis)
