"""Inputs that each layer has of each token, and the part of a layer that reads them."""

from functools import partial

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Int

from bridge.models._config import DecoderConfig
from bridge.models._constrain import Constrain
from bridge.models._linear import Embedding, Linear
from bridge.models._mlp import ACTIVATIONS
from bridge.models._norm import Norm
from bridge.models._scale import scale_by


class PerLayerInputs(nnx.Module):
    """Inputs of all layers: an embedding of each token, and its projected stream.

    Args:
      config: Config of the decoder, with `per_layer_input`.
      rngs: Source of keys.
      param_dtype: Dtype of the parameters.
      constrain: Sharding constraint of activations.

    Source: transformers `modeling_gemma4.py::Gemma4TextModel.project_per_layer_inputs`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        rngs: nnx.Rngs,
        param_dtype: DTypeLike,
        constrain: Constrain,
    ):
        """Initializes the embedding, the projection and its norm."""
        sizes = config.per_layer_input
        assert sizes is not None
        width, std = config.num_hidden_layers * sizes.size, config.initializer_range
        of = {"std": std, "rngs": rngs, "param_dtype": param_dtype}
        self.embed_tokens = Embedding(sizes.vocab_size, width, **of)
        self.projection = Linear((config.hidden_size,), (width,), **of)
        self.norm = _norm(config, sizes.size, param_dtype)
        self.num_rows = sizes.vocab_size
        self.shape = (config.num_hidden_layers, sizes.size)
        self.hidden_size = config.hidden_size
        self.constrain = constrain

    def __call__(
        self, tokens: Int[Array, "batch seq"], x: Float[Array, "batch seq embed"]
    ) -> Float[Array, "layers batch seq size"]:
        """Returns the input of each layer.

        Args:
          tokens: Token ids.
          x: Residual stream before the first layer.
        """
        shape = (*tokens.shape, *self.shape)
        # Tokens that only the other embedding has share row 0, as in transformers.
        tokens = jnp.where(tokens < self.num_rows, tokens, 0)
        own = self.constrain(self.embed_tokens(tokens), "embeddings").reshape(shape)
        # The factor is rounded to the dtype of the weights, as in training.
        own = own * jnp.asarray(self.shape[1] ** 0.5, own.dtype)
        projected = self.constrain(self.projection(x), "tokens")
        projected = scale_by(projected.reshape(shape), self.hidden_size**-0.5)
        both = scale_by(self.norm(projected) + own, 2**-0.5)
        return jnp.moveaxis(both, 2, 0)


class PerLayerInput(nnx.Module):
    """Part of a layer that gates its input by the stream, and projects it.

    Its matrices are narrow on one side, and tensor parallelism does not split them.

    Args:
      config: Config of the decoder, with `per_layer_input`.
      rngs: Source of keys.
      param_dtype: Dtype of the parameters.
      constrain: Sharding constraint of activations.

    Source: transformers `modeling_gemma4.py::Gemma4TextDecoderLayer`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        rngs: nnx.Rngs,
        param_dtype: DTypeLike,
        constrain: Constrain,
    ):
        """Initializes the gate, the projection back and its norm."""
        sizes, embed = config.per_layer_input, (config.hidden_size,)
        assert sizes is not None
        linear = partial(
            Linear, std=config.initializer_range, rngs=rngs, param_dtype=param_dtype
        )
        self.gate = linear(embed, (sizes.size,))
        self.projection = linear((sizes.size,), embed)
        self.norm = _norm(config, config.hidden_size, param_dtype)
        self.activation = ACTIVATIONS[config.hidden_act]
        self.constrain = constrain

    def __call__(
        self, x: Float[Array, "batch seq embed"], own: Float[Array, "batch seq size"]
    ) -> Float[Array, "batch seq embed"]:
        """Returns what the layer adds to the stream.

        Args:
          x: Residual stream behind the MLP.
          own: Input of the layer.
        """
        inside = self.activation(self.constrain(self.gate(x), "tokens")) * own
        return self.norm(self.constrain(self.projection(inside), "tokens"))


def _norm(config: DecoderConfig, width: int, param_dtype: DTypeLike) -> Norm:
    return Norm((width,), config.norm, config.norm_eps, param_dtype=param_dtype)
