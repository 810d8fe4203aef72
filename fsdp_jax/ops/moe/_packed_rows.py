"""Rows in float8, packed with their scales into bytes that one collective carries."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from fsdp_jax._tp_shards import num_automatic_tp
from fsdp_jax.sharding._block_float8_gather import TILE
from fsdp_jax.sharding._float8_gather import (
    exponents,
    float8_bits,
    float8_numbers,
    in_blocks,
    num_blocks,
    power_of_two,
)

_ALIGNMENT = 16
"""Bytes that a part of a packed row is a multiple of: rows then start where copies of
16 bytes at a time may start."""

PackedRows = UInt8[Array, "rows packed"]


def pack(rows: Float[Array, "rows embed"]) -> PackedRows:
    """Rounds rows to float8_e4m3fn, with a power-of-two scale for each 128 elements.

    A row is its bytes, then an E8M0 exponent for each tile of 128, then zeros up to a
    multiple of 16 bytes. Bytes that are zeros are a row of zeros. Where XLA splits the
    row over `tp` into parts of full tiles, it is as many such rows, one behind the
    other, so that a split divides bytes and scales alike. Scales round up: no element
    is clipped. A tile with infinity or NaN is NaN.

    Args:
      rows: Rows; computed in float32, to nearest, ties to even.
    """
    count, embed = rows.shape
    parts = _num_parts(embed)
    tiles = in_blocks(rows.astype(jnp.float32), TILE)
    scales = exponents(_largest(tiles))
    scaled = tiles / power_of_two(scales)[..., None]
    bits = float8_bits(scaled).reshape(count, -1)[:, :embed]
    split = [x.reshape(count, parts, -1) for x in (bits, scales)]
    used = sum(x.shape[-1] for x in split)
    rest = jnp.zeros((count, parts, packed_width(embed) // parts - used), jnp.uint8)
    return jnp.concatenate([*split, rest], axis=-1).reshape(count, -1)


def _largest(tiles: Float[Array, "rows tiles tile"]) -> Float[Array, "rows tiles"]:
    """Returns the largest magnitude of each tile, and NaN of a tile that has one.

    By the order of the bits, in which NaN is above infinity: the maximum of floats that
    XLA compiles for CPUs may lose it.
    """
    bits = lax.bitcast_convert_type(jnp.abs(tiles), jnp.uint32)
    return lax.bitcast_convert_type(bits.max(-1), jnp.float32)


def unpack(
    packed: PackedRows, embed: int, dtype: DTypeLike
) -> Float[Array, "rows embed"]:
    """Returns the numbers of packed rows.

    Args:
      packed: Rows from `pack`, under the same mesh.
      embed: Number of elements of a row.
      dtype: Dtype of the result.
    """
    count, parts = len(packed), _num_parts(embed)
    own, tiles = embed // parts, num_blocks(embed, TILE) // parts
    split = packed.reshape(count, parts, -1)
    numbers = float8_numbers(split[:, :, :own]).reshape(count, embed)
    scales = power_of_two(split[:, :, own : own + tiles]).reshape(count, -1, 1)
    scaled = (in_blocks(numbers, TILE) * scales).reshape(count, -1)
    return lax.slice_in_dim(scaled, 0, embed, axis=1).astype(dtype)


def packed_width(embed: int) -> int:
    """Returns the bytes of a packed row of `embed` elements."""
    parts = _num_parts(embed)
    used = embed // parts + num_blocks(embed, TILE) // parts
    return parts * _ALIGNMENT * -(-used // _ALIGNMENT)


def _num_parts(embed: int) -> int:
    """Returns the parts of full tiles that XLA splits a row into, over `tp`."""
    tp = num_automatic_tp()
    return 1 if embed % (tp * TILE) else tp
