"""Rows in another order, whose gradients go back the same way."""

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
    """Takes `rows[index]`; each row at most once, so that backward takes too.

    Left to itself, the gradient would be added up by a scatter, which is slow on GPUs
    and in no certain order.

    Args:
      rows: What is taken.
      index: A row for each place; one that is not there, such as `len(rows)`, is zeros.
      inverse: The place of each row; `places` or more if it has none.
    """
    del inverse
    return _take(rows, index)


def _take(rows: Array, index: Array) -> Array:
    return jnp.take(rows, index, axis=0, mode="fill", fill_value=0)


def _forward(rows, index, inverse):
    return _take(rows, index), inverse


def _backward(inverse, grad):
    return _take(grad, inverse), None, None


rearrange.defvjp(_forward, _backward)


def inverse_of(order: Int[Array, " rows"]) -> Int[Array, " rows"]:
    """The inverse of a permutation."""
    return jnp.argsort(order).astype(order.dtype)
