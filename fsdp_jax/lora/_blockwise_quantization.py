"""Blockwise quantization of weights to 8 and 4 bits, with a scale for each 64 elements.

A block is 64 consecutive elements in row-major order, the last one padded with zeros;
its scale is its largest magnitude, in float32.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int8, UInt8

from fsdp_jax.lora._config import BaseFormat

BLOCK = 64
"""Number of elements that share a scale."""

NF4 = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634),
        *(0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
        *(0.7229568362236023, 1.0),
    ],
    np.float32,
)
"""The 16 values of a 4-bit normal float: quantiles of a normal distribution.

Source: Dettmers et al. 2023, QLoRA, appendix E.
"""


def num_blocks(shape: tuple[int, ...]) -> int:
    """Returns the number of blocks of an array of this shape."""
    return -(-math.prod(shape) // BLOCK)


def code_shape(shape: tuple[int, ...], form: BaseFormat) -> tuple[tuple[int], str]:
    """Returns shape and dtype of the codes of an array of this shape."""
    elements = num_blocks(shape) * BLOCK
    return ((elements // 2,), "uint8") if form == "nf4" else ((elements,), "int8")


def quantize(
    weight: Float[Array, ...], form: BaseFormat
) -> tuple[Int8[Array, " codes"] | UInt8[Array, " codes"], Float[Array, " blocks"]]:
    """Quantizes a weight and returns its codes and scales.

    Args:
      weight: Array of any shape.
      form: "int8": multiples of 1 / 127 of the scale. "nf4": the nearest of `NF4`, two
        codes a byte, the first in its upper half.

    Returns:
      Codes of shape and dtype `code_shape`, and one float32 scale a block.

    Source: bitsandbytes `functional.py::quantize_4bit` for the order in a byte.
    """
    flat = weight.astype(jnp.float32).reshape(-1)
    blocks = jnp.pad(flat, (0, -flat.size % BLOCK)).reshape(-1, BLOCK)
    scales = jnp.abs(blocks).max(axis=1)
    # A block of zeros has scale 0 and is divided by 1.
    unit = blocks / jnp.where(scales == 0, 1, scales)[:, None]
    if form == "int8":
        return jnp.round(unit * 127).astype(jnp.int8).reshape(-1), scales
    middles = jnp.asarray((NF4[1:] + NF4[:-1]) / 2)
    codes = jnp.searchsorted(middles, unit.reshape(-1)).astype(jnp.uint8).reshape(-1, 2)
    return codes[:, 0] << 4 | codes[:, 1], scales


def dequantize(
    codes: Int8[Array, " codes"] | UInt8[Array, " codes"],
    scales: Float[Array, " blocks"],
    shape: tuple[int, ...],
    form: BaseFormat,
) -> Float[Array, ...]:
    """Returns the weight in float32: values of the codes times scales of the blocks."""
    if form == "int8":
        unit = codes.astype(jnp.float32) / 127
    else:
        unit = jnp.asarray(NF4)[jnp.stack([codes >> 4, codes & 15], axis=1)]
    blocks = unit.reshape(-1, BLOCK) * scales[:, None]
    return blocks.reshape(-1)[: math.prod(shape)].reshape(shape)
