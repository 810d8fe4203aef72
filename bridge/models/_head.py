"""What is between the last norm of a decoder and its logits."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from bridge.models._config import DecoderConfig
from bridge.models._decoder_parts import make_norm
from bridge.models._linear import Linear
from bridge.models._mlp import ACTIVATIONS
from bridge.models._scale import scale_by

States = Float[Array, "batch seq embed"]


class HeadTransform(nnx.Module):
    """Projection, activation and norm of what the output projection reads.

    Args:
      config: Config of the decoder, with `head_transform` set.
      rngs: Source of keys.
      param_dtype: Dtype of the parameters.
    """

    def __init__(
        self, config: DecoderConfig, *, rngs: nnx.Rngs, param_dtype: DTypeLike
    ):
        """Initializes the projection and the norm."""
        sizes = config.head_transform
        assert sizes is not None
        self.dense = Linear(
            (config.hidden_size,),
            (config.hidden_size,),
            bias=sizes.bias,
            std=config.initializer_range,
            rngs=rngs,
            param_dtype=param_dtype,
        )
        self.norm = make_norm(config, param_dtype)
        self.activation = sizes.hidden_act

    def __call__(self, x: States) -> States:
        """Transforms normed states."""
        return self.norm(ACTIVATIONS[self.activation](self.dense(x)))


class HeadBias(nnx.Module):
    """Bias of the logits of tied embeddings.

    Args:
      vocab: Number of logits.
      param_dtype: Dtype of the bias.
    """

    def __init__(self, vocab: int, param_dtype: DTypeLike):
        """Initializes zeros."""
        self.bias = nnx.Param(jnp.zeros(vocab, param_dtype))

    def __call__(
        self, logits: Float[Array, "batch seq vocab"]
    ) -> Float[Array, "batch seq vocab"]:
        """Adds the bias."""
        return logits + jnp.expand_dims(self.bias[...], (0, 1))


def make_head_transform(
    config: DecoderConfig, rngs: nnx.Rngs, param_dtype: DTypeLike
) -> HeadTransform | None:
    """Returns what transforms the input of the output projection; None for nothing.

    Args:
      config: Config of the decoder.
      rngs: Source of keys.
      param_dtype: Dtype of the parameters.
    """
    if config.head_transform is None:
        return None
    return HeadTransform(config, rngs=rngs, param_dtype=param_dtype)


def make_head(
    config: DecoderConfig, rngs: nnx.Rngs, param_dtype: DTypeLike
) -> Linear | HeadBias | None:
    """Returns the output projection; of tied embeddings its bias, if it has one.

    Args:
      config: Config of the decoder.
      rngs: Source of keys.
      param_dtype: Dtype of the parameters.
    """
    if config.tie_word_embeddings:
        return HeadBias(config.vocab_size, param_dtype) if config.head_bias else None
    return Linear(
        (config.hidden_size,),
        (config.vocab_size,),
        bias=config.head_bias,
        std=config.initializer_range,
        rngs=rngs,
        param_dtype=param_dtype,
    )


def finish_logits(
    config: DecoderConfig, logits: Float[Array, "..."]
) -> Float[Array, "..."]:
    """Scales and soft-caps products of head and states, elementwise.

    Args:
      config: Config of the decoder.
      logits: The products.
    """
    logits = scale_by(logits, config.logit_scale)
    logits = scale_by(logits, 1 / config.logits_scaling)
    if (cap := config.final_logit_softcapping) is not None:
        logits = cap * jnp.tanh(logits / cap)
    return logits
