"""Grouped products in float8 with current scaling, for the experts of a layer."""

import functools
from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, DTypeLike, Float, UInt8

from bridge.models._float8 import BACKWARD, FORWARD, Rounded, scale_of
from bridge.models._grouped import (
    Kernel,
    Rows,
    Sizes,
    matrices_in_blocks,
    on_gpus,
    rows_in_blocks,
)


class GroupedProduct(Protocol):
    """Signature of a product of rows, each with the matrix of its group."""

    def __call__(
        self,
        x: Rows,
        kernel: Kernel,
        group_sizes: Sizes | np.ndarray,
        *,
        expected_rows: int | None = None,
    ) -> Float[Array, "rows *width"]:
        """Returns the products; see `grouped_matmul`."""
        ...


def float8_grouped_matmul(
    x: Rows,
    kernel: Kernel,
    group_sizes: Sizes | np.ndarray,
    *,
    expected_rows: int | None = None,
    rounded: Callable[[Array], Rounded | None] | None = None,
) -> Float[Array, "rows *width"]:
    """Computes `grouped_matmul` of arrays rounded to float8, also backward.

    Rows and weights are rounded to e4m3 and gradients to e5m2. Rows and gradients have
    one scale for all of them, and each group's matrix has its own: powers of two, of
    the largest magnitude that there is now. On GPUs each block of rows is a product in
    float8; `jax.lax.ragged_dot` of float8 would multiply all rows by every matrix
    there (jax 0.10.2).

    Args:
      x: Rows sorted by group, in 16 or 32 bits.
      kernel: One matrix per group, in the same dtype.
      group_sizes: Number of rows of each group; rows after the last group give zeros.
      expected_rows: Expected number of rows in all groups, as for `grouped_matmul`.
      rounded: Function from weights to their float8 numbers, as of `float8_product`;
        all groups then have one scale.

    Returns:
      Products, in the dtype of `x`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from bridge.models import float8_grouped_matmul
      >>> kernel = jnp.stack([jnp.eye(4), 3 * jnp.eye(4)])
      >>> out = float8_grouped_matmul(jnp.ones((2, 4)), kernel, jnp.asarray([1, 1]))
      >>> out[:, 0].tolist()
      [1.0, 3.0]

    Source: as of `float8_product`; TorchAO `_scaled_grouped_mm`, for scales of groups.
    """
    expected = min(expected_rows or len(x), len(x))
    found = None if rounded is None else rounded(kernel)
    product: Array = _grouped(expected, x, kernel, found, jnp.asarray(group_sizes))
    return product.reshape(len(x), *kernel.shape[2:])


class _Rounded(NamedTuple):
    """An array in float8: bits, as of `_float8.py`, and the scale of each group."""

    bits: UInt8[Array, "..."]
    scale: Float[Array, " groups"]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(
    expected: int, x: Rows, kernel: Kernel, found: Rounded | None, group_sizes: Sizes
) -> Array:
    return _forward(expected, x, kernel, found, group_sizes)[0]


def _forward(expected, x, kernel, found, group_sizes):
    rows = _round(x[None], FORWARD)
    if found is None:
        weights, scale = kernel, _scales(_as_matrices(kernel), FORWARD)
    else:
        weights, scale = found[0], jnp.broadcast_to(found[1], len(kernel))
    matrices = _rounded_matrices(weights, scale)
    product = _rows(expected, (rows, FORWARD), matrices, group_sizes, x.dtype)
    # Not the matrices that were rounded here, which are as much for each layer: see
    # `_float8.py`.
    return product, (rows, weights, scale, group_sizes)


def _backward(expected, saved, grad):
    rows, weights, scale, group_sizes = saved
    grads, matrices = _round(grad[None], BACKWARD), _rounded_matrices(weights, scale)
    of_rows = _rows(
        expected, (grads, BACKWARD), matrices, group_sizes, grad.dtype, transposed=True
    )
    of_kernel = _matrices(expected, rows, grads, group_sizes, grad.dtype)
    return of_rows, of_kernel.reshape(weights.shape), None, None


def _rounded_matrices(weights: Array, scale: Array) -> _Rounded:
    """Returns the matrices of weights `[groups, in, *out]`, rounded unless bits."""
    matrices = _as_matrices(weights)
    if matrices.dtype == jnp.uint8:
        return _Rounded(matrices, scale)
    return _round_by(matrices, scale, FORWARD)


def _as_matrices(weights: Array) -> Array:
    return weights.reshape(*weights.shape[:2], -1)


_grouped.defvjp(_forward, _backward)


def _rows(
    expected: int,
    rows: tuple[_Rounded, DTypeLike],
    matrices: _Rounded,
    group_sizes: Sizes,
    dtype: DTypeLike,
    *,
    transposed: bool = False,
) -> Array:
    """Multiplies rounded rows by rounded matrices, or their transposes."""
    (given, float8), wide = rows, jnp.promote_types(dtype, jnp.bfloat16)

    def blocks(x, kernel, sizes):
        given = {"transposed": transposed, "expected": expected, "dtype": wide}
        return rows_in_blocks(x, kernel, sizes, **given)

    def ragged(x, kernel, sizes):
        kernel = kernel.swapaxes(1, 2) if transposed else kernel
        x, kernel = x.astype(jnp.float32), kernel.astype(jnp.float32)
        return lax.ragged_dot(x, kernel, sizes).astype(wide)

    x = lax.bitcast_convert_type(given.bits[0], float8)
    kernel = lax.bitcast_convert_type(matrices.bits, FORWARD)
    product = on_gpus(blocks, ragged, x, kernel, group_sizes)
    scales = jnp.repeat(matrices.scale, group_sizes, total_repeat_length=len(x))
    factors = (given.scale[0] * scales).astype(wide)
    return (product * factors[:, None]).astype(dtype)


def _matrices(
    expected: int, rows: _Rounded, grads: _Rounded, sizes: Sizes, dtype: DTypeLike
) -> Kernel:
    """Returns the gradient of each group's matrix."""

    def blocks(x, grad, sizes):
        return matrices_in_blocks(x, grad, sizes, jnp.float32, expected=expected)

    def ragged(x, grad, sizes):
        x, grad = x.astype(jnp.float32), grad.astype(jnp.float32)
        kernel = jnp.zeros((len(sizes), x.shape[1], grad.shape[1]))
        _, pull = jax.vjp(lambda kernel: lax.ragged_dot(x, kernel, sizes), kernel)
        return pull(grad)[0]

    x = lax.bitcast_convert_type(rows.bits[0], FORWARD)
    grad = lax.bitcast_convert_type(grads.bits[0], BACKWARD)
    made = on_gpus(blocks, ragged, x, grad, sizes)
    return (made * (rows.scale[0] * grads.scale[0])).astype(dtype)


def _scales(x: Float[Array, "groups rows width"], dtype: DTypeLike) -> Array:
    return scale_of(jnp.abs(x).max((1, 2)).astype(jnp.float32), dtype)


def _round(x: Float[Array, "groups rows width"], dtype: DTypeLike) -> _Rounded:
    return _round_by(x, _scales(x, dtype), dtype)


def _round_by(
    x: Float[Array, "groups rows width"],
    scale: Float[Array, " groups"],
    dtype: DTypeLike,
) -> _Rounded:
    rounded = (x.astype(jnp.float32) / scale[:, None, None]).astype(dtype)
    return _Rounded(lax.bitcast_convert_type(rounded, jnp.uint8), scale)
