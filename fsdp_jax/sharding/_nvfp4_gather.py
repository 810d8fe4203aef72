"""Quantization of weights for the gather: NVFP4, two elements a byte."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from fsdp_jax.sharding._float8_gather import (
    LARGEST,
    Quantized,
    check_exclude,
    exponents,
    float8_bits,
    float8_numbers,
    in_blocks,
    power_of_two,
)

BLOCK = 16
"""Elements that share a scale."""

_LARGEST_FP4 = 6.0
# Rounded by hand and not by a cast to float4_e2m1fn: jax 0.10.2 on CPUs compiles the
# bitcast of four bits to invalid LLVM code. A test compares with ml_dtypes.
# Between two neighbours of 0, 0.5, 1, 1.5, 2, 3, 4, 6. A tie goes to the even code: up
# at every other midpoint.
_TIES_DOWN = (0.25, 1.25, 2.5, 5.0)
_TIES_UP = (0.75, 1.75, 3.5)


@dataclasses.dataclass(frozen=True)
class NVFP4Gather:
    """Gathers weights as NVFP4: 16 float4_e2m1fn elements share a float8_e4m3fn scale.

    The scales of a tensor share a power of two, on which the ranks agree as for
    `Float8Gather`. Blocks lie within a rank's shard, along a dim that is not split over
    data axes. Nine bytes are communicated for 16 elements, 0.28 of bfloat16's.

    An element has two significant bits: rounding moves it by up to a quarter. Try
    `MXFP8Gather` first, and compare losses.

    Args:
      exclude: Path patterns of further parameters that are gathered in the compute
        dtype, e.g. routers, whose choices flip on small differences.
      min_elements: Number of elements below which a matrix is gathered in the compute
        dtype.

    Examples:
      >>> policy = fsdp.MixedPrecisionPolicy(param_gather=fsdp.sharding.NVFP4Gather())

    Source: TransformerEngine `recipe::NVFP4BlockScaling` (there the scale of a tensor
      is any float32, and weights may have blocks of 16 x 16).
    """

    exclude: tuple[str, ...] = ()
    min_elements: int = 4096

    name: ClassVar[str] = "nvfp4_e2m1"

    def __post_init__(self):
        """Refuses a lone string, which would be iterated by letter."""
        check_exclude(self)


def encode_nvfp4(
    piece: Float[Array, ...], largest: Float[Array, "*stacked"], axis: int
) -> Quantized:
    """Quantizes a shard in blocks of 16 along `axis`, whose size is even.

    Args:
      piece: Shard.
      largest: Largest magnitude of each unsharded tensor.
      axis: Dim of the blocks, counted from the end.

    Returns:
      Bytes and scales, without `tensor_scale`, which is `tensor_exponents(largest)`.
    """
    x = jnp.moveaxis(piece.astype(jnp.float32), axis, -1)
    dims = largest.shape + (1,) * (x.ndim - largest.ndim)
    blocks = in_blocks(x / power_of_two(tensor_exponents(largest)).reshape(dims), BLOCK)
    bits = float8_bits(jnp.abs(blocks).max(-1) / _LARGEST_FP4)
    scale = float8_numbers(bits)[..., None]
    # A scale of zero has elements of zero.
    codes = _codes(blocks / jnp.where(scale == 0, 1, scale))
    codes = lax.slice_in_dim(codes.reshape(*x.shape[:-1], -1), 0, x.shape[-1], axis=-1)
    packed = codes[..., ::2] | codes[..., 1::2] << 4
    return Quantized(jnp.moveaxis(packed, -1, axis), jnp.moveaxis(bits, -1, axis))


def decode_nvfp4(
    quantized: Quantized, tensor: UInt8[Array, ""], axis: int, dtype: DTypeLike
) -> Float[Array, ...]:
    """Dequantizes the result of `encode_nvfp4` along the same axis, of one unit.

    Args:
      quantized: Bytes and scales of one unit.
      tensor: Its `tensor_scale`.
      axis: Dim of the blocks.
      dtype: Dtype of the result.
    """
    packed = jnp.moveaxis(quantized.bytes, axis, -1)
    codes = jnp.stack([packed & 15, packed >> 4], -1)
    codes = codes.reshape(*packed.shape[:-1], 2 * packed.shape[-1])
    scale = float8_numbers(jnp.moveaxis(quantized.scale, axis, -1))[..., None]
    # Codes of zero behind the end of the last block are zero times its scale.
    scaled = in_blocks(_numbers(codes), BLOCK) * scale * power_of_two(tensor)
    joined = scaled.reshape(*codes.shape[:-1], -1)
    cut = lax.slice_in_dim(joined, 0, codes.shape[-1], axis=-1)
    return jnp.moveaxis(cut.astype(dtype), -1, axis)


def tensor_exponents(largest: Float[Array, "*stacked"]) -> UInt8[Array, "*stacked"]:
    """Returns the power of two that brings every block's scale below 448, as E8M0."""
    return exponents(largest, LARGEST * _LARGEST_FP4)


def _codes(x: Float[Array, ...]) -> UInt8[Array, ...]:
    """Rounds to float4_e2m1fn, to nearest, ties to even; a code in four bits."""
    size = jnp.abs(x)
    code = sum((size > tie).astype(jnp.uint8) for tie in _TIES_DOWN)
    code += sum((size >= tie).astype(jnp.uint8) for tie in _TIES_UP)
    return code | (x < 0).astype(jnp.uint8) << 3


def _numbers(codes: UInt8[Array, ...]) -> Float[Array, ...]:
    exponent, fraction = (codes >> 1) & 3, codes & 1
    # In halves: 0 and 1, then 2 or 3 times a power of two.
    halves = jnp.where(
        exponent == 0, fraction, (2 + fraction) << jnp.maximum(exponent, 1) - 1
    )
    sign = jnp.where(codes >> 3 == 1, -0.5, 0.5)
    return sign * halves.astype(jnp.float32)
