"""Row permutation whose gradient is a gather instead of a scatter."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@jax.custom_vjp
def rearrange(
    rows: Float[Array, "rows embed"],
    index: Int[Array, " places"],
    inverse: Int[Array, " rows"],
) -> Float[Array, "places embed"]:
    """Returns `rows[index]`, where each row is taken at most once.

    Its gradient is a gather too. By default it would be a scatter-add, which is slow on
    GPUs and sums in a nondeterministic order.

    Args:
      rows: Rows to take.
      index: Row index for each place; an out-of-range one, such as `len(rows)`, gives
        zeros.
      inverse: Place of each row; `places` or more for a row that is not taken.
    """
    del inverse
    return take_rows(rows, index)


def take_rows(
    rows: Float[Array, "rows embed"], index: Int[Array, " places"]
) -> Float[Array, "places embed"]:
    """Returns `rows[index]`, with zeros for an out-of-range index."""
    return jnp.take(rows, index, axis=0, mode="fill", fill_value=0)


def _forward(rows, index, inverse):
    return take_rows(rows, index), inverse


def _backward(inverse, grad):
    return take_rows(grad, inverse), None, None


rearrange.defvjp(_forward, _backward)


def inverse_of(order: Int[Array, " rows"]) -> Int[Array, " rows"]:
    """Returns the inverse of a permutation."""
    return jnp.argsort(order).astype(order.dtype)
