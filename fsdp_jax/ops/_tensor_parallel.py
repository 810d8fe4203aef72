"""Sequence parallelism of activations between matrices that are split over `tp`."""

from __future__ import annotations

import functools
from typing import Literal, get_args

import jax
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from fsdp_jax._scopes import SEQUENCE_PARALLEL

Place = Literal["embeddings", "tokens", "input", "output", "logits"]
"""Where in a decoder an activation is."""


def sequence_parallel(
    x: Float[Array, "batch seq features"],
    place: Place,
    *,
    axis: str = "tp",
) -> Float[Array, "batch seq features"]:
    """Constrains a decoder's activation to Megatron's sequence parallel layout.

    Between a matrix split by rows and the next one split by columns each rank has some
    of the tokens, so that norms and additions are not computed twice, nor saved twice
    for the backward pass. Tokens are all-gathered before the column-parallel matrix,
    and the partial sums of the row-parallel one are reduce-scattered; the backward pass
    does the reverse.

    Pass it as `constrain` to `bridge.models.Decoder`, or use it in any other model.
    Without a mesh that has `axis`, or where the axis is manual, it does nothing.

    Args:
      x: Activation; shapes are global over `axis`.
      place: `input` of a matrix split by columns; `output` of one split by rows;
        `tokens` of an unsplit one, which stay where they are; `embeddings` from a table
        split by rows, each rank having looked up all tokens; `logits`, split by
        vocabulary, or by tokens where the ranks do not divide it.
      axis: Mesh axis.

    Returns:
      `x`, resharded.

    Raises:
      ValueError: If `place` is none of these, or the ranks do not divide the tokens of
        a row.

    Source: Korthikanti et al., arXiv 2205.05198; Megatron-LM
      `tensor_parallel/mappings.py::gather_from_sequence_parallel_region`.
    """
    if place not in get_args(Place):
        raise ValueError(
            f"sequence_parallel(place={place!r}): it is one of "
            f"{', '.join(map(repr, get_args(Place)))}."
        )
    ranks = ranks_to_split(axis)
    if ranks == 1:
        return x
    if x.shape[1] % ranks:
        raise ValueError(
            f"Rows of {x.shape[1]} tokens do not divide over {ranks} ranks of "
            f"'{axis}'. Use rows of a multiple of {ranks}."
        )
    if place == "logits":
        dim = 1 if x.shape[2] % ranks else 2
        return _lie(x, axis, dim)
    if place == "tokens":
        return _lie(x, axis, 1)
    if place == "embeddings":
        # Otherwise XLA would split the ids and exchange their boundaries.
        x = _lie(x, axis, None)
    return _move(axis, place == "input", x)


def ranks_to_split(axis: str) -> int:
    """Returns the number of devices along `axis` if it is automatic, else 1."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if axis in mesh.manual_axes else mesh.shape.get(axis, 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _move(axis: str, is_gathered: bool, x: Array) -> Array:
    return _lie(x, axis, None if is_gathered else 1)


# A plain constraint would apply the value's sharding to its gradient too. The cotangent
# of a gathered value is a sum of per-rank terms: it must be reduce-scattered, not
# all-reduced onto every rank.
_move.defvjp(
    lambda axis, is_gathered, x: (_move(axis, is_gathered, x), None),
    lambda axis, is_gathered, _, grad: (_move(axis, not is_gathered, grad),),
)


def _lie(x: Array, axis: str, dim: int | None) -> Array:
    spec = PartitionSpec(*(axis if d == dim else None for d in range(x.ndim)))
    with jax.named_scope(SEQUENCE_PARALLEL):
        return lax.with_sharding_constraint(x, spec)
