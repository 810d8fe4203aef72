"""Attention whose keys add a bias to their scores, made of their values.

transformers keeps the keys of the largest biases of a long row, and masks the others.
Here rows are as short as the number that it keeps, so that none is masked.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from bridge.models._attention import Window
from bridge.models._cache import Slots
from bridge.models._config import DecoderConfig
from bridge.models._layer_state import IndexedKeyValues, KeyValues
from bridge.models._linear import Linear
from bridge.models._position_tables import PositionTables
from bridge.models._self_attention import Heads, SelfAttention


class DynamicMaskAttention(SelfAttention):
    """Self-attention with a bias of each key, the same for all queries.

    Args:
      config: Config of the decoder, with `dynamic_mask_size` set.
      rngs: Source of keys.
      param_dtype: Dtype of the parameters.
      **options: Others of `SelfAttention`.

    Source: transformers `modeling_doge.py::DogeAttention`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        rngs: nnx.Rngs,
        param_dtype: DTypeLike,
        **options: Any,
    ):
        """Initializes the projections, and a bias of 1 for each key."""
        super().__init__(config, rngs=rngs, param_dtype=param_dtype, **options)
        heads = (config.num_key_value_heads,)
        self.step_proj = Linear(
            (*heads, config.head_dim),
            heads,
            bias=config.attention_bias,
            std=config.initializer_range,
            rngs=rngs,
            param_dtype=param_dtype,
        )
        self.step_factor = nnx.Param(jnp.zeros(heads, param_dtype))
        self.most_keys = config.dynamic_mask_size

    def extend(
        self,
        x: Float[Array, "batch seq embed"],
        tables: PositionTables,
        cache: KeyValues | IndexedKeyValues,
        slots: Slots,
        window: Window = None,
    ) -> tuple[Float[Array, "batch seq embed"], KeyValues | IndexedKeyValues]:
        """Attends from new tokens, as `SelfAttention`; the slots are few enough."""
        assert isinstance(cache, KeyValues)
        self._check_length(cache.key.shape[1])
        return super().extend(x, tables, cache, slots, window)

    def _project(
        self,
        x: Float[Array, "batch seq embed"],
        tables: PositionTables,
    ) -> tuple[Heads, Heads, Heads]:
        """Projects to heads, with a dim for the bias behind those of the rope."""
        self._check_length(x.shape[1])
        query, key, value = super()._project(x, tables)
        steps = jax.nn.softplus(self.step_proj(value))
        factor = jnp.expand_dims(self.step_factor[...], (0, 1))
        bias = jnp.exp(factor * steps)[..., None].astype(key.dtype)
        ones = jnp.full((*query.shape[:-1], 1), 1 / self.scale, query.dtype)
        query = jnp.concatenate([query, ones], axis=-1)
        return query, jnp.concatenate([key, bias], axis=-1), value

    def _check_length(self, keys: int) -> None:
        assert self.most_keys is not None
        if keys > self.most_keys:
            raise ValueError(
                f"{keys:,} tokens a row, and dynamic_mask_size {self.most_keys:,}: "
                "beyond it keys of small biases are masked, which is not modelled. "
                "Cut rows, or generate fewer tokens."
            )
