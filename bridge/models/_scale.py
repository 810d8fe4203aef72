"""Products with factors of a config."""

import jax.numpy as jnp
from jaxtyping import Array


def scale_by(x: Array, factor: float) -> Array:
    """Multiplies in float32, so that the factor itself is not rounded to bfloat16."""
    if factor == 1:
        return x
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return (x.astype(wide) * factor).astype(x.dtype)
