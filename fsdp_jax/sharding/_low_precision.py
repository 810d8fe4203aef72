"""Weights in a byte an element: as float8 with a scale a tensor, or as MXFP8."""

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
    """Weights travel as float8_e4m3fn, with one scale a tensor, a power of two.

    When a step begins each rank rounds its own piece of a weight, by the largest
    magnitude of the whole, on which the ranks agree in one small all-reduce for all
    weights; of a stack each unit's slice has a scale of its own. What travels after
    that, however often, is a byte an element. A unit decodes what it gathered to the
    compute dtype. Main weights and gradients are not touched: an update is of what the
    optimizer has, its gradient that at the rounded weight.

    Only matrices that belong to a unit travel so, experts included; embeddings and
    heads in no unit, norms and biases travel as before, as does what is excluded.
    Where nothing travels nothing is rounded.

    Args:
      exclude: Path patterns of parameters that travel in the compute dtype besides,
        e.g. routers, whose choices flip on small differences.
      min_elements: A unit's matrices with fewer elements travel in the compute dtype.

    Source: TorchAO `fsdp_utils.py::precompute_float8_dynamic_scale_for_fsdp` for scales
      that are computed once a step.
    """

    exclude: tuple[str, ...] = ()
    min_elements: int = 4096

    name: ClassVar[str] = "float8_e4m3fn"

    def __post_init__(self):
        """Refuses a lone string, which would be taken letter by letter."""
        _check(self)


@dataclasses.dataclass(frozen=True)
class MXFP8Gather:
    """Weights travel as MXFP8: 32 elements of float8_e4m3fn share a power of two.

    As `Float8Gather`, but blocks lie within what a rank holds, along a dim that is not
    split over data axes, so that ranks agree on nothing beforehand, and a large element
    costs its own block digits instead of the whole tensor. A byte more for 32 elements
    travels. Scales round up: no element is clipped.

    Args:
      exclude: As for `Float8Gather`.
      min_elements: As for `Float8Gather`.

    Source: OCP Microscaling Formats (MX) 1.0, E4M3 elements with E8M0 scales.
    """

    exclude: tuple[str, ...] = ()
    min_elements: int = 4096

    name: ClassVar[str] = "mxfp8_e4m3fn"

    def __post_init__(self):
        """Refuses a lone string, which would be taken letter by letter."""
        _check(self)


ParamGather = Float8Gather | MXFP8Gather
"""How weights are encoded to travel."""


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("bytes", "scale"), meta_fields=()
)
@dataclasses.dataclass(frozen=True)
class Encoded:
    """A piece of a weight in a byte an element; in a `Shard`, where the piece would be.

    Attributes:
      bytes: The bits of float8_e4m3fn, `uint8` in the shape of the piece. Integers,
        so that every backend sends them as they are.
      scale: What they are multiplied by, as an exponent of E8M0, `uint8`: of
        `Float8Gather` one a tensor, `[*stacked]`, of `MXFP8Gather` one a block.
    """

    bytes: Any
    scale: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the piece."""
        return self.bytes.shape

    @property
    def ndim(self) -> int:
        """Its number of dims."""
        return self.bytes.ndim


def encode_float8(
    piece: Float[Array, ...], largest: Float[Array, "*stacked"]
) -> Encoded:
    """Rounds a piece by the largest magnitude of its tensor, to nearest, ties to even.

    By a power of two, which costs no digit of a floating-point number, and after which
    bfloat16 holds the result exactly.
    """
    dims = largest.shape + (1,) * (piece.ndim - largest.ndim)
    exponents = _exponents(largest)
    scaled = piece.astype(jnp.float32) / _power_of_two(exponents).reshape(dims)
    return Encoded(_bits(scaled), exponents)


def decode_float8(encoded: Encoded, dtype: DTypeLike) -> Float[Array, ...]:
    """The numbers of one unit's slice of a weight, in `dtype`."""
    return (_numbers(encoded.bytes) * _power_of_two(encoded.scale)).astype(dtype)


def encode_mxfp8(piece: Float[Array, ...], axis: int) -> Encoded:
    """Rounds a piece in blocks of 32 along `axis`, the last of them maybe shorter."""
    piece = jnp.moveaxis(piece.astype(jnp.float32), axis, -1)
    size = piece.shape[-1]
    blocks = _in_blocks(piece)
    exponents = _exponents(jnp.abs(blocks).max(-1))
    scaled = (blocks / _power_of_two(exponents)[..., None]).reshape(
        *piece.shape[:-1], -1
    )
    bits = _bits(lax.slice_in_dim(scaled, 0, size, axis=-1))
    return Encoded(jnp.moveaxis(bits, -1, axis), jnp.moveaxis(exponents, -1, axis))


def decode_mxfp8(encoded: Encoded, axis: int, dtype: DTypeLike) -> Float[Array, ...]:
    """The numbers of what `encode_mxfp8` rounded along the same axis, in `dtype`."""
    numbers = _numbers(jnp.moveaxis(encoded.bytes, axis, -1))
    size = numbers.shape[-1]
    scale = _power_of_two(jnp.moveaxis(encoded.scale, axis, -1))[..., None]
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
    """Blocks of a dim of `size`."""
    return -(-size // BLOCK)


def _in_blocks(x: Array) -> Array:
    """`[..., size]` to `[..., blocks, 32]`, zeros behind the end."""
    blocks = num_blocks(x.shape[-1])
    widths = [(0, 0)] * (x.ndim - 1) + [(0, blocks * BLOCK - x.shape[-1])]
    return jnp.pad(x, widths).reshape(*x.shape[:-1], blocks, BLOCK)


def _exponents(largest: Float[Array, ...]) -> UInt8[Array, ...]:
    """The least power of two, as E8M0 has it, that brings `largest` to 448 or below.

    That is the largest number of float8_e4m3fn. From the bits, since a logarithm is off
    by one now and then. Infinity and NaN have the exponent 255, which stands for NaN
    there too and makes the block NaN.
    """
    bits = lax.bitcast_convert_type(largest, jnp.uint32).astype(jnp.int32)
    exponent, fraction = bits >> 23, bits & 0x7FFFFF
    # 448 is 1.75 times 2 ** 8. At least 1: a scale is to be a normal float32.
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
