"""Products in MXFP8: blocks of 32 numbers of e4m3 share a power of two."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, Float, UInt8

from bridge.models._expert_split import is_split
from bridge.models._float8 import FORWARD, scale_of

BLOCK = 32
"""Numbers along the contracted dim that share a scale."""


def mxfp8_product(
    x: Float[Array, "..."], kernel: Float[Array, "..."], num_in: int
) -> Float[Array, "..."]:
    """Computes a `Product` of arrays rounded to MXFP8, also backward.

    Activations, weights and gradients are e4m3, with a scale for each 32 numbers along
    the dim that a product contracts: a large number costs precision in its block alone,
    where `float8_product` has one scale a tensor. Blackwell GPUs multiply so in one
    kernel of cuDNN; on others the numbers are those of MXFP8, and the product has the
    dtype of `x`, which saves no time.

    Raises:
      ValueError: If the tokens, the inputs or the outputs are no multiple of 32: each
        is contracted, forward or backward; or under tensor parallelism, over which XLA
        does not split cuDNN's kernel.

    Examples:
      >>> import jax.numpy as jnp
      >>> from bridge.models import mxfp8_product
      >>> float(mxfp8_product(jnp.ones((32, 64)), 3 * jnp.ones((64, 32)), 1)[0, 0])
      192.0

    Source: OCP Microscaling Formats (MX) 1.0; TransformerEngine `MXFP8BlockScaling`,
      for e4m3 in gradients.
    """
    if is_split():
        raise ValueError(
            "mxfp8_product under tensor parallelism: jax cannot partition its product "
            "of blocks over an automatic mesh axis (jax 0.10.2). Use float8_product, "
            "or tp=1."
        )
    tokens, out = x.shape[: x.ndim - num_in], kernel.shape[num_in:]
    sizes = [math.prod(dims) for dims in (tokens, kernel.shape[:num_in], out)]
    if any(size % BLOCK for size in sizes):
        raise ValueError(
            f"mxfp8_product of {sizes[0]} tokens, {sizes[1]} inputs and {sizes[2]} "
            f"outputs: blocks of {BLOCK} lie along each of them, so that each is a "
            f"multiple of {BLOCK}. Use float8_product, or another batch."
        )
    return _matmul(x.reshape(sizes[0], sizes[1]), kernel).reshape(*tokens, *out)


class _Blocks(NamedTuple):
    """A matrix in MXFP8, with blocks along its last dim.

    Attributes:
      bits: Bits of e4m3, integers: see `_float8.py`.
      scale: Bits of a power of two for each block, e8m0.
    """

    bits: UInt8[Array, "rows depth"]
    scale: UInt8[Array, "rows blocks"]


@jax.custom_vjp
def _matmul(x: Float[Array, "rows depth"], kernel: Float[Array, "..."]):
    return _forward(x, kernel)[0]


def _forward(x: Array, kernel: Array) -> tuple[Array, tuple[_Blocks, Array]]:
    weights = kernel.reshape(x.shape[1], -1)
    # Backward contracts the tokens: in a byte an element, blocks along these are kept.
    return _dot(_round(x), _round(weights.T), x.dtype), (_round(x.T), kernel)


def _backward(saved: tuple[_Blocks, Array], grad: Array) -> tuple[Array, Array]:
    columns, kernel = saved
    weights = kernel.reshape(columns.bits.shape[0], -1)
    of_x = _dot(_round(grad), _round(weights), grad.dtype)
    of_kernel = _dot(columns, _round(grad.T), grad.dtype)
    return of_x, of_kernel.reshape(kernel.shape)


_matmul.defvjp(_forward, _backward)


def _round(x: Float[Array, "rows depth"]) -> _Blocks:
    """Rounds to nearest, in blocks along the last dim."""
    blocks = x.astype(jnp.float32).reshape(len(x), -1, BLOCK)
    scale = scale_of(jnp.abs(blocks).max(-1), FORWARD)
    numbers = (blocks / scale[..., None]).astype(FORWARD).reshape(x.shape)
    return _Blocks(
        lax.bitcast_convert_type(numbers, jnp.uint8),
        lax.bitcast_convert_type(scale.astype(jnp.float8_e8m0fnu), jnp.uint8),
    )


def _dot(
    one: _Blocks, other: _Blocks, dtype: DTypeLike
) -> Float[Array, "rows columns"]:
    """Contracts the last dims."""

    def fused(*bits: Array) -> Array:
        numbers = [lax.bitcast_convert_type(b[None], FORWARD) for b in bits[:2]]
        scales = [lax.bitcast_convert_type(b[None], _E8M0) for b in bits[2:]]
        return jax.nn.scaled_matmul(*numbers, *scales, preferred_element_type=dtype)[0]

    def apart(one, other, one_scale, other_scale) -> Array:
        left, right = _numbers(one, one_scale), _numbers(other, other_scale)
        return lax.dot_general(left, right, (((1,), (1,)), ((), ()))).astype(dtype)

    given = one.bits, other.bits, one.scale, other.scale
    return lax.platform_dependent(*given, cuda=fused, default=apart)


_E8M0 = jnp.float8_e8m0fnu


def _numbers(bits: Array, scale: Array) -> Float[Array, "rows depth"]:
    """Returns the rounded numbers, float32."""
    blocks = lax.bitcast_convert_type(bits, FORWARD).astype(jnp.float32)
    factors = lax.bitcast_convert_type(scale, _E8M0).astype(jnp.float32)
    scaled = blocks.reshape(*scale.shape, BLOCK) * factors[..., None]
    return scaled.reshape(bits.shape)
