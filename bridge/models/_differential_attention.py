"""Differential attention: the difference of what two heads read of the same values."""

from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Int

from bridge.models._attention import Window, attend
from bridge.models._cache import Slots, store_new, visible_slots
from bridge.models._config import DecoderConfig
from bridge.models._layer_state import IndexedKeyValues, KeyValues
from bridge.models._norm import Norm
from bridge.models._position_tables import PositionTables
from bridge.models._self_attention import Heads, SelfAttention

_LAMBDA_STD = 0.1


class DifferentialAttention(SelfAttention):
    """Self-attention in pairs of heads, of which one subtracts from the other.

    A head of the first half and the one at its place in the second read the values of
    both; what the second reads is subtracted by a learned factor, and the difference is
    normed.

    Args:
      config: Config of the decoder.
      rngs: Source of keys.
      param_dtype: Dtype of the parameters.
      **options: Others of `SelfAttention`.

    Source: https://arxiv.org/abs/2410.05258; transformers
      `modeling_diffllama.py::DiffLlamaAttention`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        rngs: nnx.Rngs,
        param_dtype: DTypeLike,
        **options: Any,
    ):
        """Initializes projections, the vectors of the factor, and the norm."""
        super().__init__(config, rngs=rngs, param_dtype=param_dtype, **options)
        dims = (config.head_dim,)
        init = nnx.initializers.normal(_LAMBDA_STD, dtype=param_dtype)
        vector = partial(init, shape=dims)
        self.lambda_q1 = nnx.Param(vector(rngs.params()))
        self.lambda_k1 = nnx.Param(vector(rngs.params()))
        self.lambda_q2 = nnx.Param(vector(rngs.params()))
        self.lambda_k2 = nnx.Param(vector(rngs.params()))
        pair = (2 * config.head_dim,)
        self.pair_norm = Norm(
            pair, "rms", config.norm_eps, scale=False, param_dtype=param_dtype
        )

    def __call__(
        self,
        x: Float[Array, "batch seq embed"],
        tables: PositionTables,
        segment_ids: Int[Array, "batch seq"] | None,
        window: Window = None,
        start: Float[Array, ""] | None = None,
    ) -> Float[Array, "batch seq embed"]:
        """Attends from both heads of each pair, and subtracts.

        Args:
          x: Normed hidden states.
          tables: Tables of the positions.
          segment_ids: Segment of each token in a packed row; None for one segment.
          window: Attention window of this layer; None for the one of all layers.
          start: Factor of the layer to which the learned one is added.
        """
        query, key, value = self._project(x, tables)
        options = {"segment_ids": segment_ids, **self._score_options(window)}
        out = self.attention(query, key, _of_pairs(value), **options)
        return self.o_proj(self._subtract(out, start))

    def extend(
        self,
        x: Float[Array, "batch seq embed"],
        tables: PositionTables,
        cache: KeyValues | IndexedKeyValues,
        slots: Slots,
        window: Window = None,
        start: Float[Array, ""] | None = None,
    ) -> tuple[Float[Array, "batch seq embed"], KeyValues]:
        """Attends from new tokens, which follow those in a cache.

        Args:
          x: Normed hidden states of the new tokens.
          tables: Tables of their positions.
          cache: KV cache of this layer.
          slots: Cache slot of each new token: its position.
          window: Attention window of this layer; None for the one of all layers.
          start: Factor of the layer to which the learned one is added.

        Returns:
          Attention output, and the cache with the new tokens.
        """
        assert isinstance(cache, KeyValues)
        query, key, value = self._project(x, tables)
        key, value = cache = store_new(KeyValues(key, value), cache, slots)
        options = self._score_options(window)
        mask = visible_slots(slots, key.shape[1], options["window"])[:, None]
        scale, cap, sinks = (options[name] for name in ("scale", "softcap", "sinks"))
        out = attend(query, key, _of_pairs(value), scale, mask, cap, sinks)
        return self.o_proj(self._subtract(out, start)), cache

    def _subtract(self, out: Heads, start: Float[Array, ""] | None) -> Heads:
        """Returns the normed differences, in heads of the projection back."""
        assert start is not None
        first, second = jnp.split(out, 2, axis=2)
        wide = jnp.promote_types(out.dtype, jnp.float32)
        start = start.astype(wide)
        factor = _exponential(self.lambda_q1, self.lambda_k1, wide)
        factor += start - _exponential(self.lambda_q2, self.lambda_k2, wide)
        difference = first.astype(wide) - factor * second.astype(wide)
        normed = (1 - start) * self.pair_norm(difference)
        batch, seq, pairs, width = normed.shape
        return normed.astype(out.dtype).reshape(batch, seq, 2 * pairs, width // 2)


def lambda_starts(config: DecoderConfig) -> Float[np.ndarray, " layers"]:
    """Returns the factor of each layer before learned ones are added.

    Args:
      config: Config of the decoder.

    Source: https://arxiv.org/abs/2410.05258, section 2.1.
    """
    layers = np.arange(config.num_hidden_layers)
    return (0.8 - 0.6 * np.exp(-0.3 * layers)).astype(np.float32)


def _of_pairs(value: Heads) -> Heads:
    """Returns the values of both heads of a pair, for each of the two."""
    both = jnp.concatenate(jnp.split(value, 2, axis=2), axis=-1)
    return jnp.concatenate([both, both], axis=2)


def _exponential(query: nnx.Param, key: nnx.Param, dtype: Any) -> Float[Array, ""]:
    return jnp.exp(jnp.sum(query[...].astype(dtype) * key[...].astype(dtype)))
