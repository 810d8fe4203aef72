"""Products in float8 with current scaling: e4m3 forward, e5m2 for gradients."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Shaped, UInt8

FORWARD, BACKWARD = jnp.float8_e4m3fn, jnp.float8_e5m2


class Product(Protocol):
    """Signature of a product of activations and weights."""

    def __call__(
        self, x: Float[Array, "..."], kernel: Float[Array, "..."], num_in: int, /
    ) -> Float[Array, "..."]:
        """Contracts the last `num_in` dims of `x` with the first ones of `kernel`.

        Args:
          x: Activations `[*tokens, *in]`, in 16 or 32 bits.
          kernel: Weights `[*in, *out]`, in the same dtype.
          num_in: Number of contracted dims.

        Returns:
          The product `[*tokens, *out]`, in the dtype of `x`.
        """
        ...


def plain_product(
    x: Float[Array, "..."], kernel: Float[Array, "..."], num_in: int
) -> Float[Array, "..."]:
    """Contracts the last `num_in` dims of `x` with the first ones of `kernel`."""
    return jnp.tensordot(x, kernel, axes=num_in)


Rounded = tuple[UInt8[Array, "..."], Float[Array, ""]]
"""Bits of float8_e4m3fn in the dims of a tensor, and the factor of its elements."""


def float8_product(
    x: Float[Array, "..."],
    kernel: Float[Array, "..."],
    num_in: int,
    *,
    rounded: Callable[[Array], Rounded | None] | None = None,
) -> Float[Array, "..."]:
    """Computes a `Product` of arrays rounded to float8, also backward.

    Activations and weights are rounded to e4m3 and gradients to e5m2, each scaled by
    the largest magnitude that it has now: there is no state of earlier steps. Scales
    are powers of two, so that a weight that `Float8Gather` rounded is not changed by
    rounding it again. Under `shard_map` scales are those of a rank.

    Args:
      x: Activations `[*tokens, *in]`, in 16 or 32 bits.
      kernel: Weights `[*in, *out]`, in the same dtype.
      num_in: Number of contracted dims.
      rounded: Function from weights to their float8 numbers where there are some
        already, such as `fsdp_jax.step.gathered_float8`, and to None where not; None to
        round all weights here. The result is the same.

    Returns:
      The product `[*tokens, *out]`, in the dtype of `x`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from bridge.models import float8_product
      >>> float(float8_product(jnp.ones((2, 4)), 3 * jnp.eye(4), 1)[0, 0])
      3.0

    Source: Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433;
      TransformerEngine `Float8CurrentScaling`.
    """
    tokens = x.shape[: x.ndim - num_in]
    depth, out = math.prod(kernel.shape[:num_in]), kernel.shape[num_in:]
    found = None if rounded is None else rounded(kernel)
    # Not reshaped before: what backward keeps is then the weight itself, and no copy.
    product = _matmul(x.reshape(-1, depth), kernel, found and _Rounded(*found))
    return product.reshape(*tokens, *out)


class _Rounded(NamedTuple):
    """A tensor in float8.

    Attributes:
      bits: Its bits, integers: what `jax.checkpoint` saves in float8 it rounds as if
        e4m3fn ended at 240, which makes NaN of larger numbers (jax 0.10.2).
      scale: Factor of the elements, float32.
    """

    bits: UInt8[Array, "..."]
    scale: Float[Array, ""]


class _Saved(NamedTuple):
    """What backward reads of a product.

    Attributes:
      x: Activations in float8.
      kernel: Weights as they were given, or their bits if these were: backward of a
        layer has them anyway, and a copy in float8 would be saved for each layer,
        unsharded.
      kernel_scale: Factor of the weights in float8.
    """

    x: _Rounded
    kernel: Shaped[Array, "..."]
    kernel_scale: Float[Array, ""]


@jax.custom_vjp
def _matmul(
    x: Float[Array, "rows depth"],
    kernel: Float[Array, "..."],
    rounded: _Rounded | None,
):
    return _forward(x, kernel, rounded)[0]


def _forward(x: Array, kernel: Array, rounded: _Rounded | None) -> tuple[Array, _Saved]:
    left = _round(x, FORWARD)
    weights, scale = rounded or (kernel, _scale_of(kernel, FORWARD))
    right = _as_matrix(weights, x.shape[1], scale)
    product = _dot((left, FORWARD, 1), (right, FORWARD, 0), x.dtype)
    return product, _Saved(left, weights, scale)


def _backward(saved: _Saved, grad: Array) -> tuple[Array, Array, None]:
    left, weights, scale = saved
    right = _as_matrix(weights, left.bits.shape[1], scale)
    rows = _round(grad, BACKWARD)
    of_x = _dot((rows, BACKWARD, 1), (right, FORWARD, 1), grad.dtype)
    of_kernel = _dot((left, FORWARD, 0), (rows, BACKWARD, 0), grad.dtype)
    return of_x, of_kernel.reshape(weights.shape), None


def _as_matrix(weights: Array, depth: int, scale: Array) -> _Rounded:
    """Returns weights `[*in, *out]` as a rounded matrix; bits are taken as they are."""
    matrix = weights.reshape(depth, -1)
    if matrix.dtype == jnp.uint8:
        return _Rounded(matrix, scale)
    return _round_by(matrix, scale, FORWARD)


_matmul.defvjp(_forward, _backward)


def _round(x: Float[Array, "rows columns"], dtype: DTypeLike) -> _Rounded:
    """Rounds to nearest, scaled by the largest magnitude."""
    return _round_by(x, _scale_of(x, dtype), dtype)


def _scale_of(x: Float[Array, "..."], dtype: DTypeLike) -> Float[Array, ""]:
    """Returns the scale of a whole tensor."""
    return scale_of(jnp.abs(x).max().astype(jnp.float32), dtype)


def scale_of(
    largest: Float[Array, "*blocks"], dtype: DTypeLike
) -> Float[Array, "*blocks"]:
    """Returns the least power of two at which nothing is clipped.

    Infinity and NaN make the scale, and with it all products, not a number.

    Args:
      largest: Largest magnitude, float32.
      dtype: Float8 dtype.
    """
    fraction, exponent = jnp.frexp(largest / float(jnp.finfo(dtype).max))
    # frexp's fraction is below 1: a power of two is 0.5 times the next one.
    exponent = jnp.clip(exponent - (fraction == 0.5), -100, 100)
    scale = jnp.ldexp(jnp.float32(1), exponent)
    return jnp.where(jnp.isfinite(largest), scale, jnp.nan)


def _round_by(
    x: Float[Array, "rows columns"], scale: Float[Array, ""], dtype: DTypeLike
) -> _Rounded:
    rounded = (x.astype(jnp.float32) / scale).astype(dtype)
    return _Rounded(lax.bitcast_convert_type(rounded, jnp.uint8), scale)


def _dot(left: Any, right: Any, dtype: DTypeLike) -> Float[Array, "rows columns"]:
    """Contracts a dim of each: `(rounded, float8 dtype, contracted dim)`.

    The product is written in `dtype` and scaled behind: a power of two rounds nothing,
    and XLA for GPUs multiplies in float8 where nothing stands before the product. Sums
    of 448 x 448 exceed float16, which is written in float32 first.
    """
    (one, one_dtype, one_dim), (other, other_dtype, other_dim) = left, right
    narrow = jnp.dtype(dtype) == jnp.float16
    product = lax.dot_general(
        lax.bitcast_convert_type(one.bits, one_dtype),
        lax.bitcast_convert_type(other.bits, other_dtype),
        (((one_dim,), (other_dim,)), ((), ())),
        preferred_element_type=jnp.float32 if narrow else dtype,
    )
    return (product * (one.scale * other.scale).astype(product.dtype)).astype(dtype)
