"""Copies of rows, whose gradient is a sum of gathered rows instead of a scatter."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fsdp_jax.ops.moe._gather_rows import take_rows


@jax.custom_vjp
def repeat_rows(
    rows: Float[Array, "rows embed"],
    index: Int[Array, " places"],
    places: Int[Array, "rows most"],
) -> Float[Array, "places embed"]:
    """Returns `rows[index]`, where each row is taken at most `most` times.

    Args:
      rows: Rows to take.
      index: Row index for each place; an out-of-range one gives zeros.
      places: Places of each row; out-of-range ones count for nothing.
    """
    del places
    return take_rows(rows, index)


def _forward(rows, index, places):
    return take_rows(rows, index), places


def _backward(places, grad):
    return sum_rows(grad, places), None, None


repeat_rows.defvjp(_forward, _backward)


def sum_rows(
    rows: Float[Array, "places embed"],
    places: Int[Array, "sums most"],
    weights: Float[Array, "sums most"] | None = None,
) -> Float[Array, "sums embed"]:
    """Sums `weights * rows[places]` over the places of each sum.

    It adds in float32, in the order of the places, and rounds once.

    Args:
      rows: Rows to add.
      places: Rows of each sum; an out-of-range one counts as zeros.
      weights: Weight of each row in its sum; None for 1.
    """
    wide = jnp.promote_types(rows.dtype, jnp.float32)
    total = jnp.zeros((len(places), rows.shape[-1]), wide)
    # One elementwise kernel: a product with [sums, most, embed] would store that array.
    for at in range(places.shape[-1]):
        part = take_rows(rows, places[:, at]).astype(wide)
        total += part if weights is None else part * weights[:, at, None].astype(wide)
    return total.astype(rows.dtype)
