"""Optimizer state in 8 bits: codes of a dynamic exponent and fraction."""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, UInt8

from fsdp_jax.optim._quantized_state import (
    StateForm,
    normalized,
    scaled,
    with_quantized_state,
)


def eight_bit(
    tx: optax.GradientTransformation,
    *,
    unsigned: tuple[str, ...] = ("nu",),
    block: int = 256,
    min_elements: int = 4096,
) -> optax.GradientTransformation:
    """Stores the float32 state of an optimizer in 8 bits an element.

    A code is one of 256 values of a dynamic exponent and fraction, over seven decades,
    times the scale of its block. Adam's moments take a quarter of their memory, 2.03
    bytes a parameter. They are quantized and dequantized elementwise, split like their
    parameters; only a block that spans several devices needs communication, for its
    largest magnitude.

    Args:
      tx: Optax transformation whose state has arrays in the shapes of parameters.
      unsigned: Fields of its state that are never negative, such as `nu` of
        `ScaleByAdamState`: they get twice as many values above zero. Updates are
        divided by their roots, so that none of their elements is rounded to zero.
      block: Number of elements of the last dim that share a scale; a shorter dim is one
        block.
      min_elements: Number of elements below which an array stays in float32, as biases
        and norms do. Averages of `ema_of_params` stay too.

    Returns:
      A transformation in place of `tx`.

    Raises:
      ValueError: If `block` or `min_elements` is less than 1; from its `init`, if no
        array of the state is quantized.

    Source: Dettmers et al. 2022, 8-bit optimizers via block-wise quantization;
      bitsandbytes `functional.py::create_dynamic_map` for the values.
    """
    if block < 1 or min_elements < 1:
        raise ValueError(
            f"eight_bit({block=}, {min_elements=}) must each be at least 1."
        )

    def codec(fields: str) -> _EightBits | None:
        names = set(fields.split("."))
        # An average would stand still: its steps are less than those of a code.
        return None if "ema" in names else _EightBits(bool(names & {*unsigned}), block)

    asked = f"eight_bit(min_elements={min_elements})"
    return with_quantized_state(tx, StateForm(codec, min_elements, asked))


@dataclasses.dataclass(frozen=True)
class _EightBits:
    """Codes of an array; see `eight_bit`."""

    is_unsigned: bool
    block: int

    def encode(
        self, x: Float[Array, "*shape"]
    ) -> tuple[UInt8[Array, "*shape"], Float[Array, ...]]:
        """Returns the codes, and the largest magnitude of each block."""
        unit, scales = normalized(x, self.block)
        values = dynamic_values(is_unsigned=self.is_unsigned)
        middles = jnp.asarray((values[1:] + values[:-1]) / 2)
        # The code of the nearest value: the number of midpoints below the element.
        codes = jnp.searchsorted(middles, unit).astype(jnp.uint8)
        if self.is_unsigned:
            codes = jnp.where(unit > 0, jnp.maximum(codes, 1), codes)  # 0 is zero.
        return codes, scales

    def decode(
        self, codes: UInt8[Array, "*shape"], scales: Float[Array, ...]
    ) -> Float[Array, "*shape"]:
        """Returns the values of codes."""
        values = jnp.asarray(dynamic_values(is_unsigned=self.is_unsigned))
        return scaled(values[codes], scales, self.block)


@functools.cache
def dynamic_values(*, is_unsigned: bool) -> np.ndarray:
    """Returns the 256 values of a code, from -1 or 0 to 1, in ascending order.

    The values are 0, 1 and those of seven decades. Decade i, which ends at 10**(i - 6),
    has 2**i values of each sign, or 2**(i + 1) if all are positive: the midpoints of as
    many equal steps from 0.1 to 1 of it.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        steps = np.linspace(0.1, 1, 2 ** (decade + is_unsigned) + 1, dtype=np.float32)
        middles = (steps[1:] + steps[:-1]) / 2 * np.float32(10.0 ** (decade - 6))
        values += [*middles] if is_unsigned else [*middles, *-middles]
    return np.sort(np.array(values, np.float32))
