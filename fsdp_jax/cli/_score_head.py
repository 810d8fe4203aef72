"""Decoder with a score head in place of its output projection."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from bridge.hf._score_head import without_head
from bridge.models import Decoder, DecoderConfig
from bridge.models._linear import Linear


class ScoredDecoder(Decoder):
    """A decoder that scores rows in place of predicting tokens.

    The score is a linear function, without bias, of the normed final state of a row's
    last token, as in transformers' `*ForSequenceClassification` with one label.

    Args:
      config: Config of the decoder.
      rngs: Source of keys for the initial weights.
      param_dtype: Dtype of the parameters.
      options: Other arguments of `Decoder`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        rngs: nnx.Rngs,
        param_dtype: DTypeLike = jnp.float32,
        **options: Any,
    ):
        """Initializes all weights, without an output projection."""
        body = without_head(config)
        super().__init__(body, rngs=rngs, param_dtype=param_dtype, **options)
        self.score = Linear(
            (config.hidden_size,),
            (1,),
            std=config.initializer_range,
            rngs=rngs,
            param_dtype=param_dtype,
        )

    def score_of_last(
        self,
        states: Float[Array, "batch seq embed"],
        is_last: Float[Array, "batch seq"],
    ) -> Float[Array, " batch"]:
        """Returns the score of each row, in float32.

        Args:
          states: Final states from `final_states`.
          is_last: 1 at the last token of each row, 0 elsewhere.
        """
        rows = jnp.arange(states.shape[0])
        last = states[rows, is_last.argmax(axis=-1)]
        return self.score(last[:, None])[:, 0, 0].astype(jnp.float32)
