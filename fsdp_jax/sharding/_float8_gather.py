"""Quantization of weights for the gather: float8 with a scale a tensor, or MXFP8."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

BLOCK = 32
"""Elements that share a scale in the microscaling formats."""


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
        _check(self)


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
        _check(self)


ParamGather = Float8Gather | MXFP8Gather
"""Quantized format in which weights are gathered."""


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("bytes", "scale"), meta_fields=()
)
@dataclasses.dataclass(frozen=True)
class Quantized:
    """A quantized shard of a weight, a byte an element; the `value` of a `Shard`.

    Attributes:
      bytes: Bits of float8_e4m3fn, `uint8` in the shape of the shard. Integers, so that
        every backend communicates them unchanged.
      scale: Factor of the elements, as an E8M0 exponent, `uint8`: one a tensor,
        `[*stacked]`, for `Float8Gather`; one a block for `MXFP8Gather`.
    """

    bytes: Any
    scale: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the shard."""
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
    exponents = _exponents(largest)
    scaled = piece.astype(jnp.float32) / _power_of_two(exponents).reshape(dims)
    return Quantized(_bits(scaled), exponents)


def decode_float8(quantized: Quantized, dtype: DTypeLike) -> Float[Array, ...]:
    """Dequantizes one unit's slice of a weight to `dtype`."""
    return (_numbers(quantized.bytes) * _power_of_two(quantized.scale)).astype(dtype)


def encode_mxfp8(piece: Float[Array, ...], axis: int) -> Quantized:
    """Quantizes a shard in blocks of 32 along `axis`; the last block may be shorter."""
    piece = jnp.moveaxis(piece.astype(jnp.float32), axis, -1)
    size = piece.shape[-1]
    blocks = _in_blocks(piece)
    exponents = _exponents(jnp.abs(blocks).max(-1))
    scaled = (blocks / _power_of_two(exponents)[..., None]).reshape(
        *piece.shape[:-1], -1
    )
    bits = _bits(lax.slice_in_dim(scaled, 0, size, axis=-1))
    return Quantized(jnp.moveaxis(bits, -1, axis), jnp.moveaxis(exponents, -1, axis))


def decode_mxfp8(
    quantized: Quantized, axis: int, dtype: DTypeLike
) -> Float[Array, ...]:
    """Dequantizes the result of `encode_mxfp8` along the same axis to `dtype`."""
    numbers = _numbers(jnp.moveaxis(quantized.bytes, axis, -1))
    size = numbers.shape[-1]
    scale = _power_of_two(jnp.moveaxis(quantized.scale, axis, -1))[..., None]
    scaled = (_in_blocks(numbers) * scale).reshape(*numbers.shape[:-1], -1)
    cut = lax.slice_in_dim(scaled, 0, size, axis=-1)
    return jnp.moveaxis(cut.astype(dtype), -1, axis)


def _check(gather: ParamGather) -> None:
    if isinstance(gather.exclude, str):
        raise ValueError(
            f"{type(gather).__name__}(exclude={gather.exclude!r}) takes a sequence of "
            f"path patterns: write exclude=({gather.exclude!r},)."
        )


def num_blocks(size: int) -> int:
    """Returns the number of blocks of a dim of `size` elements."""
    return -(-size // BLOCK)


def _in_blocks(x: Array) -> Array:
    """Reshapes `[..., size]` to `[..., blocks, 32]`, with zero padding at the end."""
    blocks = num_blocks(x.shape[-1])
    widths = [(0, 0)] * (x.ndim - 1) + [(0, blocks * BLOCK - x.shape[-1])]
    return jnp.pad(x, widths).reshape(*x.shape[:-1], blocks, BLOCK)


def _exponents(largest: Float[Array, ...]) -> UInt8[Array, ...]:
    """Returns, as E8M0, the least power of two `s` with `largest / s <= 448`.

    448 is the largest finite float8_e4m3fn. Infinity and NaN have the exponent 255,
    which means NaN in E8M0 and makes the block NaN.
    """
    # From the bits: a floating-point logarithm is off by one for some inputs.
    bits = lax.bitcast_convert_type(largest, jnp.uint32).astype(jnp.int32)
    exponent, fraction = bits >> 23, bits & 0x7FFFFF
    # 448 = 1.75 * 2 ** 8: a fraction above 0.75 needs the next power of two. At least
    # 1, so that the scale is a normal float32.
    scale = exponent - 8 + (fraction > 0x600000)
    return jnp.where(exponent == 255, 255, jnp.maximum(scale, 1)).astype(jnp.uint8)


def _power_of_two(exponents: UInt8[Array, ...]) -> Float[Array, ...]:
    bits = exponents.astype(jnp.uint32) << 23
    return lax.bitcast_convert_type(bits, jnp.float32)


def _bits(scaled: Float[Array, ...]) -> UInt8[Array, ...]:
    return lax.bitcast_convert_type(scaled.astype(jnp.float8_e4m3fn), jnp.uint8)


def _numbers(bits: UInt8[Array, ...]) -> Float[Array, ...]:
    numbers = lax.bitcast_convert_type(bits, jnp.float8_e4m3fn)
    return numbers.astype(jnp.float32)
