"""Attention to the blocks of keys that an indexer selects."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Int

from bridge.models._attention import Window, attend, causal_mask
from bridge.models._block_indexer import (
    BlockIndexer,
    blocks_of_slots,
    blocks_of_texts,
)
from bridge.models._cache import Slots, attend_cached, visible_slots
from bridge.models._config import DecoderConfig
from bridge.models._layer_state import IndexedKeyValues, KeyValues
from bridge.models._position_tables import PositionTables
from bridge.models._self_attention import SelfAttention


class BlockSparseAttention(SelfAttention):
    """Grouped-query attention to the blocks of keys that an indexer selects.

    In rows of at most `BlockIndexerConfig.num_keys` tokens an indexer selects all
    blocks: there it is not run, and attention is that of `SelfAttention`. In longer
    rows scores of all keys exist at once, and those not selected are masked.

    Args:
      config: Config of the decoder, with a `block_indexer`.
      rngs: Source of keys.
      param_dtype: Dtype of the parameters.
      **options: Those of `SelfAttention`.

    Source: transformers `modeling_minimax_m3_vl.py::MiniMaxM3VLAttention`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        rngs: nnx.Rngs,
        param_dtype: DTypeLike,
        **options: Any,
    ):
        """Initializes attention, and the indexer."""
        super().__init__(config, rngs=rngs, param_dtype=param_dtype, **options)
        self.indexer = BlockIndexer(config, rngs=rngs, param_dtype=param_dtype)

    def __call__(
        self,
        x: Float[Array, "batch seq embed"],
        tables: PositionTables,
        segment_ids: Int[Array, "batch seq"] | None,
        window: Window = None,
    ) -> Float[Array, "batch seq embed"]:
        """Attends to the keys of selected blocks.

        Args:
          x: Normed hidden states.
          tables: Tables of the positions.
          segment_ids: Segment of each token in a packed row; None for one segment.
          window: None; no layer with an indexer slides.
        """
        sizes, indexer = self.indexer.sizes, self.indexer
        batch, seq, _ = x.shape
        if seq <= sizes.num_keys:
            return super().__call__(x, tables, segment_ids, window)
        blocks = blocks_of_texts(
            (batch, seq), segment_ids, sizes.block_size, sizes.num_local_blocks
        )
        mask = causal_mask(seq, segment_ids, None)[:, 0]
        keys = indexer.keys(x, tables)
        selected = indexer.select(x, keys, tables, blocks, mask)
        query, key, value = self._project(x, tables)
        sinks = None if self.sinks is None else self.sinks[...]
        out = attend(query, key, value, self.scale, selected, self.softcap, sinks)
        return self.o_proj(self._finish(out, x))

    def extend(
        self,
        x: Float[Array, "batch seq embed"],
        tables: PositionTables,
        cache: KeyValues | IndexedKeyValues,
        slots: Slots,
        window: Window = None,
    ) -> tuple[Float[Array, "batch seq embed"], KeyValues | IndexedKeyValues]:
        """Attends from new tokens to selected ones of those in a cache, and themselves.

        Args:
          x: Normed hidden states of the new tokens.
          tables: Tables of their positions.
          cache: Cache of this layer, with keys of the indexer.
          slots: Cache slot of each new token: its position.
          window: None; no layer with an indexer slides.

        Returns:
          Attention output, and the cache with the new tokens.
        """
        assert isinstance(cache, IndexedKeyValues)
        sizes, indexer = self.indexer.sizes, self.indexer
        rows = jnp.arange(slots.shape[0])[:, None]
        keys = cache.index_key.at[rows, slots].set(indexer.keys(x, tables))
        selected, count = None, keys.shape[1]
        if count > sizes.num_keys:
            blocks = blocks_of_slots(
                slots, count, sizes.block_size, sizes.num_local_blocks
            )
            mask = visible_slots(slots, count)
            selected = indexer.select(x, keys, tables, blocks, mask)
        query, key, value = self._project(x, tables)
        new, options = KeyValues(key, value), self._score_options(window)
        out, attended = attend_cached(
            query, new, cache.attention, slots, **options, selected=selected
        )
        return self.o_proj(self._finish(out, x)), IndexedKeyValues(attended, keys)


def block_indexer_paths(config: DecoderConfig) -> tuple[str, ...]:
    """Returns the paths of the parameters of all indexers of blocks.

    Args:
      config: Config of the decoder.
    """
    names = ("q_proj.kernel", "k_proj.kernel", "q_norm.scale", "k_norm.scale")
    return tuple(
        f"{stack.path}.self_attn.indexer.{name}"
        for stack in config.layer_stacks
        if stack.kind.indexes and config.block_indexer is not None
        for name in names
    )
