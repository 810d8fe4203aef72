"""Quantization of weights for the gather: float8 with a scale for 128 x 128 blocks."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from fsdp_jax.sharding._float8_gather import (
    Quantized,
    check_exclude,
    exponents,
    float8_bits,
    float8_numbers,
    num_blocks,
    power_of_two,
)

TILE = 128
"""Rows and columns of a block."""


@dataclasses.dataclass(frozen=True)
class BlockFloat8Gather:
    """Gathers weights as float8_e4m3fn in blocks of 128 x 128, each with a scale.

    Scales are powers of two. Blocks lie within a rank's shard, of which the last rows
    and columns may be shorter blocks, so that ranks need not agree on scales.

    Args:
      exclude: Path patterns of further parameters that are gathered in the compute
        dtype, e.g. routers, whose choices flip on small differences.
      min_elements: Number of elements below which a matrix is gathered in the compute
        dtype.

    Examples:
      >>> policy = fsdp.MixedPrecisionPolicy(
      ...     param_gather=fsdp.sharding.BlockFloat8Gather(exclude=("layers.*.router",))
      ... )

    Source: TransformerEngine `recipe::Float8BlockScaling`, whose weights have blocks of
      128 x 128 (there of the unsharded weight).
    """

    exclude: tuple[str, ...] = ()
    min_elements: int = 4096

    name: ClassVar[str] = "float8_e4m3fn, 128 x 128"

    def __post_init__(self):
        """Refuses a lone string, which would be iterated by letter."""
        check_exclude(self)


def encode_block_float8(piece: Float[Array, ...], dims: tuple[int, int]) -> Quantized:
    """Quantizes a shard in blocks over two dims, which count from the end.

    Args:
      piece: Shard.
      dims: The dim that data axes split, and the other dim of the blocks.
    """
    x = jnp.moveaxis(piece.astype(jnp.float32), dims, (-2, -1))
    *lead, rows, cols = x.shape
    sizes = num_blocks(rows, TILE), num_blocks(cols, TILE)
    widths = [(0, n * TILE - size) for n, size in zip(sizes, (rows, cols), strict=True)]
    padded = jnp.pad(x, [(0, 0)] * len(lead) + widths)
    blocks = padded.reshape(*lead, sizes[0], TILE, sizes[1], TILE)
    scale = exponents(jnp.abs(blocks).max((-3, -1)))
    bits = float8_bits(x / _spread(power_of_two(scale), rows, cols))
    return Quantized(
        jnp.moveaxis(bits, (-2, -1), dims), jnp.moveaxis(scale, (-2, -1), dims)
    )


def decode_block_float8(
    quantized: Quantized, dims: tuple[int, int], pieces: int, dtype: DTypeLike
) -> Float[Array, ...]:
    """Dequantizes a gathered weight.

    Args:
      quantized: The results of `encode_block_float8`, concatenated along `dims[0]`.
      dims: Dims of the blocks, as there.
      pieces: Number of shards.
      dtype: Dtype of the result.
    """
    x = float8_numbers(jnp.moveaxis(quantized.bytes, dims, (-2, -1)))
    scale = power_of_two(jnp.moveaxis(quantized.scale, dims, (-2, -1)))
    *lead, rows, cols = x.shape
    # Blocks begin anew in each shard.
    by_shard = scale.reshape(*lead, pieces, -1, scale.shape[-1])
    factors = _spread(by_shard, rows // pieces, cols).reshape(x.shape)
    return jnp.moveaxis((x * factors).astype(dtype), (-2, -1), dims)


def _spread(
    scale: Float[Array, "*lead m n"], rows: int, cols: int
) -> Float[Array, "*lead rows cols"]:
    """Repeats the scale of each block for its elements."""
    for dim, size in ((-2, rows), (-1, cols)):
        repeated = jnp.repeat(scale, TILE, axis=dim)
        scale = jnp.moveaxis(jnp.moveaxis(repeated, dim, 0)[:size], 0, dim)
    return scale
