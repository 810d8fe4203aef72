"""The small parts of a decoder layer. Compute follows the dtype of the weights."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Int

from bridge.models._attention import Attention
from bridge.models._config import DecoderConfig
from bridge.models._rope import apply_rope


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
        bias: bool,
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
    """A table of token vectors, which may double as the output projection.

    flax's own `nnx.Embed` fixes its compute dtype when it is made; this one follows
    whatever weights it is handed.

    Args:
      config: Gives the sizes and the standard deviation.
      rngs: Source of keys.
      param_dtype: Dtype of the parameters.
    """

    def __init__(
        self, config: DecoderConfig, *, rngs: nnx.Rngs, param_dtype: DTypeLike
    ):
        """Makes a normal table."""
        init = nnx.initializers.normal(config.initializer_range, dtype=param_dtype)
        shape = (config.vocab_size, config.hidden_size)
        self.embedding = nnx.Param(init(rngs.params(), shape))

    def __call__(
        self, tokens: Int[Array, "batch seq"]
    ) -> Float[Array, "batch seq embed"]:
        """Looks tokens up; an id past the vocabulary gives NaN, not another row."""
        return jnp.take(self.embedding[...], tokens, axis=0, mode="fill")

    def attend(
        self, x: Float[Array, "batch seq embed"]
    ) -> Float[Array, "batch seq vocab"]:
        """Scores every token of the vocabulary, for tied embeddings."""
        return jnp.einsum("bse,ve->bsv", x, self.embedding[...])


class RMSNorm(nnx.Module):
    """Root-mean-square norm: statistics in float32, scale in the weights' dtype.

    The cast comes before the scale, as in transformers; after it, bfloat16 logits
    would differ in their last bit.

    Source: transformers `modeling_llama.py::LlamaRMSNorm`.
    """

    def __init__(self, config: DecoderConfig, *, param_dtype: DTypeLike):
        """Makes a scale of ones."""
        self.scale = nnx.Param(jnp.ones(config.hidden_size, param_dtype))
        self.epsilon = config.rms_norm_eps

    def __call__(
        self, x: Float[Array, "batch seq embed"]
    ) -> Float[Array, "batch seq embed"]:
        """Scales each vector to a root mean square of `scale`."""
        x_32 = x.astype(jnp.float32)
        variance = jnp.mean(jnp.square(x_32), axis=-1, keepdims=True)
        normed = (x_32 * jax.lax.rsqrt(variance + self.epsilon)).astype(x.dtype)
        return normed * self.scale[...][None, None, :]


class SelfAttention(nnx.Module):
    """Grouped-query self-attention with rotary positions."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        rngs: nnx.Rngs,
        param_dtype: DTypeLike,
        attention: Attention,
    ):
        """Makes the four projections; `attention` is kept as it is."""
        embed, head_dim = (config.hidden_size,), config.head_dim
        heads = (config.num_attention_heads, head_dim)
        kv_heads = (config.num_key_value_heads, head_dim)

        def linear(in_shape, out_shape):
            return Linear(
                in_shape,
                out_shape,
                bias=config.attention_bias,
                std=config.initializer_range,
                rngs=rngs,
                param_dtype=param_dtype,
            )

        self.q_proj, self.o_proj = linear(embed, heads), linear(heads, embed)
        self.k_proj, self.v_proj = linear(embed, kv_heads), linear(embed, kv_heads)
        self.attention = attention
        self.scale = head_dim**-0.5

    def __call__(
        self,
        x: Float[Array, "batch seq embed"],
        cos: Float[Array, "batch seq head_dim"],
        sin: Float[Array, "batch seq head_dim"],
        segment_ids: Int[Array, "batch seq"] | None,
    ) -> Float[Array, "batch seq embed"]:
        """Mixes each token with those before it."""
        query = apply_rope(self.q_proj(x), cos, sin)
        key = apply_rope(self.k_proj(x), cos, sin)
        mixed = self.attention(
            query, key, self.v_proj(x), scale=self.scale, segment_ids=segment_ids
        )
        return self.o_proj(mixed)


class MLP(nnx.Module):
    """Gated MLP: `down(silu(gate(x)) * up(x))`."""

    def __init__(
        self, config: DecoderConfig, *, rngs: nnx.Rngs, param_dtype: DTypeLike
    ):
        """Makes the three projections."""
        embed, mlp = (config.hidden_size,), (config.intermediate_size,)

        def linear(in_shape, out_shape):
            return Linear(
                in_shape,
                out_shape,
                bias=config.mlp_bias,
                std=config.initializer_range,
                rngs=rngs,
                param_dtype=param_dtype,
            )

        self.gate_proj, self.up_proj = linear(embed, mlp), linear(embed, mlp)
        self.down_proj = linear(mlp, embed)

    def __call__(
        self, x: Float[Array, "batch seq embed"]
    ) -> Float[Array, "batch seq embed"]:
        """Works on each token by itself."""
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))
