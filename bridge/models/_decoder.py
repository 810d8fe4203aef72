"""The reference decoder: a function of its config, one device's plain JAX."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Int

from bridge.models._attention import Attention, dot_product_attention
from bridge.models._config import DecoderConfig
from bridge.models._modules import MLP, Embedding, Linear, RMSNorm, SelfAttention
from bridge.models._rope import rope_tables

Scan = Callable[..., tuple[Any, Any]]


def plain_scan(
    unit: Callable[..., tuple[Any, Any]],
    stacked: Any,
    carry: Any,
    xs: tuple[Any, ...] = (),
    consts: tuple[Any, ...] = (),
) -> tuple[Any, Any]:
    """Runs `unit` over stacked weights, one layer at a time.

    The default of the decoder's `scan` argument, and the signature that any other
    must have: everything differentiable enters by an argument.

    Args:
      unit: `unit(weights, carry, *x_slices, *consts) -> (carry, y)`.
      stacked: Pytree of weights with a leading layer dim.
      carry: What the first unit receives.
      xs: Pytrees with a leading layer dim, sliced for each unit.
      consts: Pytrees that every unit receives whole.

    Returns:
      The last carry, and the `y`s stacked.
    """

    def body(carry, slices):
        weights, x_slices = slices
        return unit(weights, carry, *x_slices, *consts)

    return jax.lax.scan(body, carry, (stacked, xs))


class DecoderLayer(nnx.Module):
    """One layer: attention, then MLP, each normed before and added after."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        rngs: nnx.Rngs,
        param_dtype: DTypeLike = jnp.float32,
        attention: Attention = dot_product_attention,
    ):
        """Makes the weights of one layer, without a layer dim."""
        self.input_layernorm = RMSNorm(config, param_dtype=param_dtype)
        self.self_attn = SelfAttention(
            config, rngs=rngs, param_dtype=param_dtype, attention=attention
        )
        self.post_attention_layernorm = RMSNorm(config, param_dtype=param_dtype)
        self.mlp = MLP(config, rngs=rngs, param_dtype=param_dtype)

    def __call__(
        self,
        x: Float[Array, "batch seq embed"],
        cos: Float[Array, "batch seq head_dim"],
        sin: Float[Array, "batch seq head_dim"],
        segment_ids: Int[Array, "batch seq"] | None = None,
    ) -> Float[Array, "batch seq embed"]:
        """Adds what attention and MLP make to the residual stream."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, segment_ids)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nnx.Module):
    """A decoder-only language model whose layers are stacked in one module.

    `layers` is a single `DecoderLayer` with a leading layer dim on every leaf, so
    that a scan compiles one layer and a file's layers land in one array. Parameters
    are only touched inside the call of the module that owns them: whoever replaces
    `DecoderLayer.__call__` sees every use of a layer's weights.

    What parallelism changes comes in as an argument with a plain default.

    Args:
      config: Sizes and traits.
      rngs: Source of keys for the initial weights.
      param_dtype: Dtype of the parameters.
      scan: Runs the layers; the signature of `plain_scan`.
      attention: Mixes tokens; the signature of `dot_product_attention`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        rngs: nnx.Rngs,
        param_dtype: DTypeLike = jnp.float32,
        scan: Scan = plain_scan,
        attention: Attention = dot_product_attention,
    ):
        """Makes all weights; under `nnx.eval_shape`, only their shapes."""
        self.config = config
        self.scan = scan
        self.embed_tokens = Embedding(config, rngs=rngs, param_dtype=param_dtype)

        @nnx.split_rngs(splits=config.num_hidden_layers)
        @nnx.vmap
        def make_layers(rngs: nnx.Rngs) -> DecoderLayer:
            return DecoderLayer(
                config, rngs=rngs, param_dtype=param_dtype, attention=attention
            )

        self.layers = make_layers(rngs)
        self.norm = RMSNorm(config, param_dtype=param_dtype)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(
                (config.hidden_size,),
                (config.vocab_size,),
                bias=False,
                std=config.initializer_range,
                rngs=rngs,
                param_dtype=param_dtype,
            )

    def __call__(
        self,
        tokens: Int[Array, "batch seq"],
        positions: Int[Array, "batch seq"] | None = None,
        segment_ids: Int[Array, "batch seq"] | None = None,
    ) -> Float[Array, "batch seq vocab"]:
        """Predicts the next token at every position.

        Args:
          tokens: Token ids.
          positions: Position of each token in its text; None counts from 0 in each
            row. Only differences matter, so packed texts need no restart.
          segment_ids: Which of several texts packed in a row a token belongs to;
            None means one text a row.

        Returns:
          Logits in the dtype of the weights: a loss that sums over the vocabulary
          should cast them to float32 first.
        """
        if positions is None:
            row = jnp.arange(tokens.shape[1], dtype=jnp.int32)
            positions = jnp.broadcast_to(row[None, :], tokens.shape)
        x = self.embed_tokens(tokens)
        cos, sin = rope_tables(self.config, positions, x.dtype)
        x, _ = self.scan(_apply_layer, self.layers, x, consts=(cos, sin, segment_ids))
        x = self.norm(x)
        if self.config.tie_word_embeddings:
            return self.embed_tokens.attend(x)
        return self.lm_head(x)


def _apply_layer(layer: DecoderLayer, x: Array, *consts: Any) -> tuple[Array, None]:
    # By the call, not by the parts: a subclass may gather the weights at entry.
    return layer(x, *consts), None
