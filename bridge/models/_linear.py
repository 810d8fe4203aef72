"""Projections and tables. Compute follows the dtype of the weights."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Int


class Linear(nnx.Module):
    """A projection whose kernel keeps heads and head_dim apart.

    Separate dims let a mesh axis split whole heads, and let a file's
    `(heads head_dim)` rows be addressed by head.

    Args:
      in_shape: Dims that are summed over, e.g. `(embed,)` or `(heads, head_dim)`.
      out_shape: Dims that are made.
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
        """Makes a normal kernel and, if asked for, a zero bias."""
        kernel = nnx.initializers.normal(std, dtype=param_dtype)
        self.kernel = nnx.Param(kernel(rngs.params(), in_shape + out_shape))
        self.bias = nnx.Param(jnp.zeros(out_shape, param_dtype)) if bias else None
        self.num_in = len(in_shape)

    def __call__(self, x: Float[Array, "batch seq *in"]) -> Float[Array, "..."]:
        """Projects the dims after `batch seq`."""
        y = jnp.tensordot(x, self.kernel[...], axes=self.num_in)
        return y if self.bias is None else y + jnp.expand_dims(self.bias[...], (0, 1))


class Embedding(nnx.Module):
    """A table of vectors, which may double as the output projection.

    flax's own `nnx.Embed` fixes its compute dtype when it is made; this one follows
    whatever weights it is handed.

    Args:
      num_embeddings: Rows.
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
        """Makes a normal table."""
        init = nnx.initializers.normal(std, dtype=param_dtype)
        self.embedding = nnx.Param(init(rngs.params(), (num_embeddings, features)))

    def __call__(self, ids: Int[Array, "batch seq"]) -> Float[Array, "batch seq embed"]:
        """Looks rows up; an id past the table gives NaN, not another row."""
        return jnp.take(self.embedding[...], ids, axis=0, mode="fill")

    def attend(
        self, x: Float[Array, "batch seq embed"]
    ) -> Float[Array, "batch seq vocab"]:
        """Scores every token of the vocabulary, for tied embeddings."""
        return jnp.einsum("bse,ve->bsv", x, self.embedding[...])
