"""Casts to narrower floating dtypes that make no number infinite."""

import numpy as np
from jax import numpy as jnp

# A dtype with larger numbers has the range of float32, up to rounding.
_WIDE = 2.0**64


def cast(destination: np.ndarray, source: np.ndarray, name: str) -> None:
    """Casts an array into another.

    Args:
      destination: Array to fill.
      source: Array of the same shape.
      name: Name of the tensor, for messages.

    Raises:
      ValueError: As `check_range` does.
    """
    check_range(source, destination.dtype, name)
    np.copyto(destination, source, casting="unsafe")


def check_range(array: np.ndarray, dtype: np.dtype, name: str) -> None:
    """Checks that finite numbers stay so in another dtype.

    numpy makes them infinite, or NaN where a dtype has no infinity. Numbers of 32 bits
    are not looked at for bfloat16, whose range is theirs up to rounding: that would be
    another pass over most weights that are loaded.

    Args:
      array: Numbers.
      dtype: Dtype that they get.
      name: Name of the tensor, for messages.

    Raises:
      ValueError: If one is beyond the largest of the dtype.
    """
    floating = jnp.issubdtype(array.dtype, jnp.floating)
    if not floating or not jnp.issubdtype(dtype, jnp.floating):
        return
    largest = float(jnp.finfo(dtype).max)
    if largest >= float(jnp.finfo(array.dtype).max):
        return
    if largest > _WIDE and array.dtype.itemsize <= 4:
        return
    beyond = float(np.max(np.abs(array), where=np.isfinite(array), initial=0))
    if beyond > largest * (1 + float(jnp.finfo(dtype).eps) / 4):
        wider = "float32 or bfloat16" if largest < _WIDE else "float64"
        raise ValueError(
            f"'{name}' has a number of magnitude {beyond:g}, beyond {largest:g}, the "
            f"largest of {dtype.name}: use {wider}."
        )
