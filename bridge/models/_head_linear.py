"""Projection of each head by a matrix of its own."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float


class HeadLinear(nnx.Module):
    """Linear projection of the dims of each head.

    Args:
      num_heads: Number of heads.
      width: Dims of a head.
      out_width: Dims of its projection.
      bias: Whether a bias is added.
      std: Standard deviation of the initial kernel.
      rngs: Source of keys.
      param_dtype: Dtype of the parameters.

    Source: transformers `modeling_zamba.py::ZambaMambaMixer`.
    """

    def __init__(
        self,
        num_heads: int,
        width: int,
        out_width: int,
        *,
        bias: bool = False,
        std: float,
        rngs: nnx.Rngs,
        param_dtype: DTypeLike,
    ):
        """Initializes a normal kernel and, with `bias`, a zero bias."""
        init = nnx.initializers.normal(std, dtype=param_dtype)
        self.kernel = nnx.Param(init(rngs.params(), (num_heads, width, out_width)))
        zeros = jnp.zeros((num_heads, out_width), param_dtype)
        self.bias = nnx.Param(zeros) if bias else None

    def __call__(
        self, x: Float[Array, "batch seq heads width"]
    ) -> Float[Array, "batch seq heads out"]:
        """Projects each head."""
        y = jnp.einsum("bshi,hio->bsho", x, self.kernel[...])
        return y if self.bias is None else y + jnp.expand_dims(self.bias[...], (0, 1))
