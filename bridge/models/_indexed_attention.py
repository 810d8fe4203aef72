"""Latent attention to the keys that an indexer selects."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, DTypeLike, Float, Int

from bridge.models._attention import Window, attend, causal_mask
from bridge.models._cache import Slots, attend_cached, visible_slots
from bridge.models._config import DecoderConfig
from bridge.models._indexer import Indexer, Selected
from bridge.models._latent_attention import LatentAttention
from bridge.models._layer_state import IndexedKeyValues, KeyValues
from bridge.models._position_tables import PositionTables


class SelectedStream(NamedTuple):
    """Residual stream beside the keys that the last indexer selected.

    Attributes:
      stream: Residual stream, or several.
      selected: 1 for each selected key of a query, else 0; numbers, as a carry that is
        differentiated holds no others.
    """

    stream: Float[Array, "batch seq *streams embed"]
    selected: Float[Array, "batch seq keys"]


class IndexedAttention(LatentAttention):
    """Latent attention whose queries attend to the keys that an indexer selects.

    In rows of at most `IndexerConfig.num_selected` tokens an indexer selects all keys:
    there it is not run, and attention is that of `LatentAttention`. In longer rows
    scores of all keys exist at once, and those not selected are masked.

    Args:
      config: Config of the decoder, with an indexer.
      indexes: Whether the layer has an indexer; else it attends to the keys that the
        last one selected.
      rngs: Source of keys.
      param_dtype: Dtype of the parameters.
      **options: Those of `SelfAttention`.

    Source: transformers `modeling_glm_moe_dsa.py::GlmMoeDsaAttention`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        indexes: bool,
        rngs: nnx.Rngs,
        param_dtype: DTypeLike,
        **options: Any,
    ):
        """Initializes latent attention, and the indexer."""
        super().__init__(config, rngs=rngs, param_dtype=param_dtype, **options)
        make = Indexer(config, rngs=rngs, param_dtype=param_dtype) if indexes else None
        self.indexer = make

    def __call__(
        self,
        x: Float[Array, "batch seq embed"],
        tables: PositionTables,
        segment_ids: Int[Array, "batch seq"] | None,
        window: Window = None,
        selected: Selected | None = None,
    ) -> Float[Array, "batch seq embed"]:
        """Attends to selected keys; to all of them without `selected`.

        Args:
          x: Normed hidden states.
          tables: Tables of the positions.
          segment_ids: Segment of each token in a packed row; None for one segment.
          window: None; no layer with an indexer slides.
          selected: Keys that each query attends to.
        """
        if selected is None:
            return super().__call__(x, tables, segment_ids, window)
        query, key, value, gate = self._project_gated(x, tables)
        options = self._score_options(window)
        scores = options["scale"], selected[:, None], options["softcap"]
        out = attend(query, key, value, *scores, options["sinks"])
        return self.o_proj(self._finish(out, x, gate))

    def select(
        self,
        x: Float[Array, "batch seq embed"],
        tables: PositionTables,
        segment_ids: Int[Array, "batch seq"] | None,
        before: Selected | None,
    ) -> Selected | None:
        """Returns the keys that each query attends to; None for all.

        Args:
          x: Normed hidden states.
          tables: Tables of the positions.
          segment_ids: Segment of each token in a packed row; None for one segment.
          before: Keys that the last indexer selected.
        """
        if self.indexer is None or x.shape[1] <= self.indexer.num_selected:
            return before
        mask = causal_mask(x.shape[1], segment_ids, None)[:, 0]
        keys = self.indexer.keys(x, tables)
        return self.indexer.select(x, self._query_latent(x), keys, tables, mask)

    def extend_selected(
        self,
        x: Float[Array, "batch seq embed"],
        tables: PositionTables,
        cache: KeyValues | IndexedKeyValues,
        slots: Slots,
        before: Selected | None,
    ) -> tuple[
        Float[Array, "batch seq embed"], KeyValues | IndexedKeyValues, Selected | None
    ]:
        """Attends from new tokens to selected ones of those in a cache, and themselves.

        Args:
          x: Normed hidden states of the new tokens.
          tables: Tables of their positions.
          cache: Cache of this layer.
          slots: Cache slot of each new token: its position.
          before: Keys that the last indexer selected; None for all.

        Returns:
          Attention output, the cache with the new tokens, and the selected keys.
        """
        query, key, value, gate = self._project_gated(x, tables)
        selected, new = before, KeyValues(key, value)
        options = self._score_options(None)
        if isinstance(cache, KeyValues):
            out, cache = attend_cached(
                query, new, cache, slots, selected=_of_all(selected), **options
            )
            return self.o_proj(self._finish(out, x, gate)), cache, selected
        assert self.indexer is not None
        rows = jnp.arange(slots.shape[0])[:, None]
        keys = self.indexer.keys(x, tables)
        keys = cache.index_key.at[rows, slots].set(keys)
        if keys.shape[1] > self.indexer.num_selected:
            mask = visible_slots(slots, keys.shape[1])
            latent = self._query_latent(x)
            selected = self.indexer.select(x, latent, keys, tables, mask)
        of_heads = _of_all(selected)
        out, attended = attend_cached(
            query, new, cache.attention, slots, selected=of_heads, **options
        )
        out = self.o_proj(self._finish(out, x, gate))
        return out, IndexedKeyValues(attended, keys), selected


def _of_all(selected: Selected | None) -> Bool[Array, "batch 1 seq keys"] | None:
    """Returns the keys as those of all heads alike."""
    return None if selected is None else selected[:, None]


def select_all(x: Array, keys: int) -> SelectedStream:
    """Returns a stream before the first indexer: all keys are selected.

    Args:
      x: Residual stream.
      keys: Number of keys.
    """
    return SelectedStream(x, jnp.ones((*x.shape[:2], keys), x.dtype))


def indexer_paths(config: DecoderConfig) -> tuple[str, ...]:
    """Returns the paths of the parameters of all indexers.

    Args:
      config: Config of the decoder.
    """
    names = ("q_proj.kernel", "k_proj.kernel", "weights_proj.kernel")
    names += ("k_norm.scale", "k_norm.bias")
    return tuple(
        f"{stack.path}.self_attn.indexer.{name}"
        for stack in config.layer_stacks
        if stack.kind.indexes and config.indexer is not None
        for name in names
    )
