"""Linear and embedding modules, whose compute dtype is that of the weights."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Int

from bridge.models._float8 import Product, plain_product


class Linear(nnx.Module):
    """Linear projection with multi-dimensional input and output, such as heads.

    Separate `heads` and `head_dim` dims let a mesh axis split heads, and let the
    `(heads head_dim)` rows of a file be addressed by head.

    Args:
      in_shape: Contracted dims, such as `(embed,)` or `(heads, head_dim)`.
      out_shape: Output dims.
      bias: Whether a bias of `out_shape` is added.
      std: Standard deviation of the initial kernel.
      rngs: Source of keys.
      param_dtype: Dtype of the parameters.
    """

    def __init__(
        self,
        in_shape: tuple[int, ...],
        out_shape: tuple[int, ...],
        *,
        bias: bool = False,
        std: float,
        rngs: nnx.Rngs,
        param_dtype: DTypeLike,
    ):
        """Initializes a normal kernel and, with `bias`, a zero bias."""
        kernel = nnx.initializers.normal(std, dtype=param_dtype)
        self.kernel = nnx.Param(kernel(rngs.params(), in_shape + out_shape))
        self.bias = nnx.Param(jnp.zeros(out_shape, param_dtype)) if bias else None
        self.num_in = len(in_shape)
        self.product: Product = plain_product

    def __call__(self, x: Float[Array, "batch seq *in"]) -> Float[Array, "..."]:
        """Projects the dims after `batch seq`."""
        y = self.product(x, self.kernel[...], self.num_in)
        return y if self.bias is None else y + jnp.expand_dims(self.bias[...], (0, 1))


class Embedding(nnx.Module):
    """Embedding table, which can also be the output projection.

    flax's `nnx.Embed` fixes its compute dtype at construction; this one uses the dtype
    of its current weights.

    Args:
      num_embeddings: Number of rows.
      features: Width of a row.
      std: Standard deviation of the initial table.
      rngs: Source of keys.
      param_dtype: Dtype of the parameters.
    """

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        std: float,
        rngs: nnx.Rngs,
        param_dtype: DTypeLike,
    ):
        """Initializes a normal table."""
        init = nnx.initializers.normal(std, dtype=param_dtype)
        self.embedding = nnx.Param(init(rngs.params(), (num_embeddings, features)))

    def __call__(self, ids: Int[Array, "batch seq"]) -> Float[Array, "batch seq embed"]:
        """Returns the rows of ids; out-of-range ids give NaN instead of another row."""
        return jnp.take(self.embedding[...], ids, axis=0, mode="fill")

    def attend(
        self, x: Float[Array, "batch seq embed"]
    ) -> Float[Array, "batch seq vocab"]:
        """Returns the product with the transposed table: logits of tied embeddings."""
        return jnp.einsum("bse,ve->bsv", x, self.embedding[...])
