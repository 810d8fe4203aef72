"""Activations of a model whose matrices are split over `tp`: who has which part."""

from __future__ import annotations

import functools
from typing import Literal

import jax
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float


def sequence_parallel(
    x: Float[Array, "batch seq features"],
    place: Literal["embeddings", "tokens", "input", "output", "logits"],
    *,
    axis: str = "tp",
) -> Float[Array, "batch seq features"]:
    """Lays a decoder's activation out over `axis`: Megatron's sequence parallel.

    Between a matrix split by rows and the next one split by columns each rank has some
    of the tokens: norms and additions are not done twice, and what is kept for backward
    is not either. So tokens are gathered before the one, and the terms of the other's
    sums are reduce-scattered; backward does the same the other way round.

    It is for the `constrain` of `bridge.models.Decoder`, and for a model of your own.
    Without a mesh with such an axis, or where it is manual, it does nothing.

    Args:
      x: Shapes are global over `axis`.
      place: `input` of a matrix split by columns; `output` of one split by rows;
        `tokens` of one that is not split, which stay where they are; `embeddings` from
        a table split by rows, each rank having looked up all tokens; `logits`, split by
        vocabulary, or by tokens where the ranks do not divide it.
      axis: The mesh axis.

    Returns:
      The same numbers.

    Raises:
      ValueError: If the ranks do not divide the tokens of a row.

    Source: Korthikanti et al., arXiv 2205.05198; Megatron-LM
      `tensor_parallel/mappings.py::gather_from_sequence_parallel_region`.
    """
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
    if place == "embeddings":  # Else XLA would cut the ids, and shift their ends about.
        x = _lie(x, axis, None)
    return _move(axis, place == "input", x)


def ranks_to_split(axis: str) -> int:
    """Devices along `axis` if what is split over it is left to XLA, else 1."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if axis in mesh.manual_axes else mesh.shape.get(axis, 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _move(axis: str, is_gathered: bool, x: Array) -> Array:
    return _lie(x, axis, None if is_gathered else 1)


# A constraint alone would ask of the gradient what it asks of the value: of a sum whose
# terms the ranks have that each of them gets all of it.
_move.defvjp(
    lambda axis, is_gathered, x: (_move(axis, is_gathered, x), None),
    lambda axis, is_gathered, _, grad: (_move(axis, not is_gathered, grad),),
)


def _lie(x: Array, axis: str, dim: int | None) -> Array:
    spec = PartitionSpec(*(axis if d == dim else None for d in range(x.ndim)))
    with jax.named_scope("sequence_parallel"):
        return lax.with_sharding_constraint(x, spec)
