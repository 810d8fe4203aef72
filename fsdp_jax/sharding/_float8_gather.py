"""Quantization of weights for the gather: float8 with a scale a tensor, or MXFP8."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

BLOCK = 32
"""Elements that share a scale in the microscaling formats."""

LARGEST = 448.0
"""Largest finite float8_e4m3fn."""


@dataclasses.dataclass(frozen=True)
class Float8Gather:
    """Gathers weights as float8_e4m3fn, with one power-of-two scale a tensor.

    When a step begins each rank quantizes its own shard of a weight, scaled by the
    largest magnitude of the unsharded weight. The ranks agree on these magnitudes in
    one small all-reduce for all weights; in a stack each unit's slice has a scale of
    its own. Each gather after that communicates a byte an element. A unit dequantizes
    the gathered weight to its compute dtype. Main weights and gradients are not
    quantized: the update applies to the optimizer's weights, with the gradient taken at
    the rounded ones.

    Only matrices that belong to a unit are quantized, experts included. Embeddings and
    heads in no unit, norms, biases and excluded parameters are gathered in the compute
    dtype. Where nothing is communicated nothing is rounded.

    Args:
      exclude: Path patterns of further parameters that are gathered in the compute
        dtype, e.g. routers, whose choices flip on small differences.
      min_elements: Number of elements below which a matrix is gathered in the compute
        dtype.

    Source: TorchAO `fsdp_utils.py::precompute_float8_dynamic_scale_for_fsdp` for scales
      that are computed once a step.
    """

    exclude: tuple[str, ...] = ()
    min_elements: int = 4096

    name: ClassVar[str] = "float8_e4m3fn"

    def __post_init__(self):
        """Refuses a lone string, which would be iterated by letter."""
        check_exclude(self)


@dataclasses.dataclass(frozen=True)
class MXFP8Gather:
    """Gathers weights as MXFP8: 32 float8_e4m3fn elements share a power-of-two scale.

    Unlike those of `Float8Gather`, blocks lie within a rank's shard, along a dim that
    is not split over data axes. So ranks need not agree on scales, and a large element
    costs precision in its own block and not in the whole tensor. One byte more is
    communicated for 32 elements. Scales round up: no element is clipped.

    Args:
      exclude: Path patterns of further parameters that are gathered in the compute
        dtype, e.g. routers, whose choices flip on small differences.
      min_elements: Number of elements below which a matrix is gathered in the compute
        dtype.

    Source: OCP Microscaling Formats (MX) 1.0, E4M3 elements with E8M0 scales.
    """

    exclude: tuple[str, ...] = ()
    min_elements: int = 4096

    name: ClassVar[str] = "mxfp8_e4m3fn"

    def __post_init__(self):
        """Refuses a lone string, which would be iterated by letter."""
        check_exclude(self)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("bytes", "scale", "tensor_scale"),
    meta_fields=(),
)
@dataclasses.dataclass(frozen=True)
class Quantized:
    """A quantized shard of a weight; the `value` of a `Shard`.

    Attributes:
      bytes: Bits of float8_e4m3fn, `uint8` in the shape of the shard; for `NVFP4Gather`
        two elements a byte along the dim of the blocks. Integers, so that every backend
        communicates them unchanged.
      scale: Factor of the elements, `uint8`: an E8M0 exponent a tensor, `[*stacked]`,
        for `Float8Gather`; one a block for `MXFP8Gather` and `BlockFloat8Gather`; bits
        of float8_e4m3fn a block for `NVFP4Gather`.
      tensor_scale: Factor of the blocks' scales, for `NVFP4Gather`: an E8M0 exponent a
        tensor, `uint8` `[*stacked]`; None for all others.
    """

    bytes: Any
    scale: Any
    tensor_scale: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the bytes."""
        return self.bytes.shape

    @property
    def ndim(self) -> int:
        """Number of dims of the shard."""
        return self.bytes.ndim


def encode_float8(
    piece: Float[Array, ...], largest: Float[Array, "*stacked"]
) -> Quantized:
    """Quantizes a shard, scaled by the largest magnitude of its tensor.

    Rounds to nearest, ties to even. The scale is a power of two, so scaling rounds
    nothing and bfloat16 represents the result exactly.
    """
    dims = largest.shape + (1,) * (piece.ndim - largest.ndim)
    exponent = exponents(largest)
    scaled = piece.astype(jnp.float32) / power_of_two(exponent).reshape(dims)
    return Quantized(float8_bits(scaled), exponent)


def decode_float8(quantized: Quantized, dtype: DTypeLike) -> Float[Array, ...]:
    """Dequantizes one unit's slice of a weight to `dtype`."""
    return (float8_numbers(quantized.bytes) * power_of_two(quantized.scale)).astype(
        dtype
    )


def encode_mxfp8(piece: Float[Array, ...], axis: int) -> Quantized:
    """Quantizes a shard in blocks of 32 along `axis`; the last block may be shorter."""
    piece = jnp.moveaxis(piece.astype(jnp.float32), axis, -1)
    size = piece.shape[-1]
    blocks = in_blocks(piece)
    exponent = exponents(jnp.abs(blocks).max(-1))
    scaled = (blocks / power_of_two(exponent)[..., None]).reshape(*piece.shape[:-1], -1)
    bits = float8_bits(lax.slice_in_dim(scaled, 0, size, axis=-1))
    return Quantized(jnp.moveaxis(bits, -1, axis), jnp.moveaxis(exponent, -1, axis))


def decode_mxfp8(
    quantized: Quantized, axis: int, dtype: DTypeLike
) -> Float[Array, ...]:
    """Dequantizes the result of `encode_mxfp8` along the same axis to `dtype`."""
    numbers = float8_numbers(jnp.moveaxis(quantized.bytes, axis, -1))
    size = numbers.shape[-1]
    scale = power_of_two(jnp.moveaxis(quantized.scale, axis, -1))[..., None]
    scaled = (in_blocks(numbers) * scale).reshape(*numbers.shape[:-1], -1)
    cut = lax.slice_in_dim(scaled, 0, size, axis=-1)
    return jnp.moveaxis(cut.astype(dtype), -1, axis)


def check_exclude(gather: Any) -> None:
    """Raises if `exclude` of a format is a lone string."""
    if isinstance(gather.exclude, str):
        raise ValueError(
            f"{type(gather).__name__}(exclude={gather.exclude!r}) takes a sequence of "
            f"path patterns: write exclude=({gather.exclude!r},)."
        )


def num_blocks(size: int, block: int = BLOCK) -> int:
    """Returns the number of blocks of a dim of `size` elements."""
    return -(-size // block)


def in_blocks(x: Array, block: int = BLOCK) -> Array:
    """Reshapes `[..., size]` to `[..., blocks, block]`, with zeros at the end."""
    blocks = num_blocks(x.shape[-1], block)
    widths = [(0, 0)] * (x.ndim - 1) + [(0, blocks * block - x.shape[-1])]
    return jnp.pad(x, widths).reshape(*x.shape[:-1], blocks, block)


def exponents(largest: Float[Array, ...], limit: float = LARGEST) -> UInt8[Array, ...]:
    """Returns, as E8M0, the least power of two `s` with `largest / s <= limit`.

    Infinity and NaN have the exponent 255, which means NaN in E8M0 and makes the block
    NaN.
    """
    # From the bits: a floating-point logarithm is off by one for some inputs.
    bits = lax.bitcast_convert_type(largest, jnp.uint32).astype(jnp.int32)
    exponent, fraction = bits >> 23, bits & 0x7FFFFF
    # limit = significand * 2 ** power: a larger significand needs the next power of
    # two. At least 1, so that the scale is a normal float32.
    half, above = math.frexp(limit)
    scale = exponent - (above - 1) + (fraction > int((2 * half - 1) * 2**23))
    return jnp.where(exponent == 255, 255, jnp.maximum(scale, 1)).astype(jnp.uint8)


def power_of_two(exponent: UInt8[Array, ...]) -> Float[Array, ...]:
    """Returns the numbers of E8M0 exponents, float32."""
    bits = exponent.astype(jnp.uint32) << 23
    return lax.bitcast_convert_type(bits, jnp.float32)


def float8_bits(scaled: Float[Array, ...]) -> UInt8[Array, ...]:
    """Rounds to float8_e4m3fn, to nearest, and returns the bits."""
    return lax.bitcast_convert_type(scaled.astype(jnp.float8_e4m3fn), jnp.uint8)


def float8_numbers(bits: UInt8[Array, ...]) -> Float[Array, ...]:
    """Returns the numbers of bits of float8_e4m3fn, float32."""
    numbers = lax.bitcast_convert_type(bits, jnp.float8_e4m3fn)
    return numbers.astype(jnp.float32)
