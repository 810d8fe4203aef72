"""Factors of the embeddings of tokens, and a fixed table of positions."""

import math

import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int

from bridge.models._config import DecoderConfig
from bridge.models._scale import scale_by

Stream = Float[Array, "batch seq embed"]

_LONGEST_WAVE = 10000.0


def scale_embeddings(config: DecoderConfig, x: Stream) -> Stream:
    """Multiplies the embeddings of tokens by the factors of the config.

    Args:
      config: Config of the decoder.
      x: Embeddings.
    """
    if config.scale_embeddings:
        # The factor is rounded to the dtype of the weights, as in training.
        x = x * jnp.asarray(config.hidden_size**0.5, x.dtype)
    return scale_by(x, config.embedding_multiplier)


def sinusoids(
    positions: Int[Array, "batch seq"], size: int, dtype: DTypeLike
) -> Stream:
    """Returns sines, then cosines of each position, of waves ever longer.

    Args:
      positions: Positions of the tokens.
      size: Width of the stream; of an odd one the last dim is 0.
      dtype: Dtype of the result, which is computed in float32.

    Source: transformers
      `modeling_xglm.py::XGLMSinusoidalPositionalEmbedding.get_embedding`.
    """
    half = size // 2
    step = math.log(_LONGEST_WAVE) / (half - 1)
    rates = jnp.exp(-step * jnp.arange(half, dtype=jnp.float32))
    angles = positions[..., None].astype(jnp.float32) * rates[None, None]
    table = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return jnp.pad(table, [(0, 0), (0, 0), (0, size % 2)]).astype(dtype)
