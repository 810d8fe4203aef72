"""Attention to single tokens of a window and to entries that each stand for several."""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, DTypeLike, Float, Int

from bridge.models._attention import Attention, Window, attend, causal_mask
from bridge.models._cache import Slots, visible_slots
from bridge.models._compressor import Compressor
from bridge.models._config import DecoderConfig
from bridge.models._constrain import Constrain
from bridge.models._entry_indexer import EntryIndexer
from bridge.models._entry_windows import EntryWindows, windows_of_texts
from bridge.models._grouped_projection import GroupedProjection
from bridge.models._indexer import Selected
from bridge.models._layer_kinds import Compression
from bridge.models._layer_state import CompressedKeyValues, CompressorInputs
from bridge.models._linear import Linear
from bridge.models._norm import Norm
from bridge.models._position_tables import PositionTables
from bridge.models._rope import rope_tables, rotate_last

Stream = Float[Array, "batch seq embed"]
Heads = Float[Array, "batch seq heads head_dim"]
Latent = Float[Array, "batch seq q_rank"]
Keys = Float[Array, "batch keys head_dim"]


class _Projected(NamedTuple):
    """What tokens are projected to.

    Attributes:
      x: Normed hidden states of the tokens.
      tables: Tables of their positions.
      latent: Latent vectors of the queries.
      query: Queries, rotated.
      key: Keys, rotated.
    """

    x: Stream
    tables: PositionTables
    latent: Latent
    query: Heads
    key: Keys


class _EntryInputs(NamedTuple):
    """What entries are made of, and who attends to them.

    Attributes:
      made: Inputs of the compressor of the layer, and of that of its indexer.
      cos: Cosines of the angles at the start of each window.
      sin: Sines of the angles.
      visible: Whether all tokens of an entry are among those up to each query.
      windows: Windows of the texts of packed rows; None for rows of one text.
    """

    made: tuple[CompressorInputs, ...]
    cos: Float[Array, "#batch entries half_rope_dim"]
    sin: Float[Array, "#batch entries half_rope_dim"]
    visible: Bool[Array, "#batch seq entries"]
    windows: EntryWindows | None


class CompressedAttention(nnx.Module):
    """Attention with one shared head of keys that are also the values.

    Queries attend to the tokens of a window, and where the layer compresses also to the
    entries of all full windows of tokens up to their own. The last dims of heads are
    rotated; as values are rotated keys, outputs are turned back by the position of the
    query. Groups of heads are projected apart, and then together.

    Args:
      config: Config of the decoder, with `compressed_attention`.
      compresses: Which entries the layer attends to; None for none.
      window: Attention window in tokens, if all layers share it; else None.
      rngs: Source of keys.
      param_dtype: Dtype of the parameters.
      attention: Attention function, with the signature of `dot_product_attention`;
        not run in layers with entries, whose scores all exist at once.
      constrain: Sharding constraint of activations.

    Source: transformers `modeling_deepseek_v4.py::DeepseekV4Attention`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        compresses: Compression | None,
        window: int | None,
        rngs: nnx.Rngs,
        param_dtype: DTypeLike,
        attention: Attention,
        constrain: Constrain,
    ):
        """Initializes the projections, norms, sinks, compressor and indexer."""
        sizes = config.compressed_attention
        assert sizes is not None
        options = {"rngs": rngs, "param_dtype": param_dtype}
        linear = partial(Linear, std=config.initializer_range, **options)
        norm = partial(
            Norm, kind=config.norm, epsilon=config.norm_eps, param_dtype=param_dtype
        )
        embed, rank, width = (
            (size,) for size in (config.hidden_size, sizes.q_lora_rank, config.head_dim)
        )
        heads = (config.num_attention_heads, config.head_dim)
        self.q_a_proj, self.q_b_proj = linear(embed, rank), linear(rank, heads)
        self.q_a_norm, self.q_b_norm = norm(rank), norm(width, scale=False)
        self.kv_proj, self.kv_norm = linear(embed, width), norm(width)
        self.o_a_proj = GroupedProjection(config, **options)
        self.o_b_proj = linear((sizes.o_groups, sizes.o_lora_rank), embed)
        sinks = jnp.zeros(heads[:1], param_dtype)
        self.sinks = nnx.Param(sinks) if config.attention_sinks else None
        compressor = indexer = None
        if compresses is not None:
            is_sparse = compresses == "sparse"
            rate = sizes.sparse_rate if is_sparse else sizes.heavy_rate
            compressor = Compressor(
                config, config.head_dim, rate, overlaps=is_sparse, **options
            )
            indexer = EntryIndexer(config, **options) if is_sparse else None
        self.compressor, self.indexer = compressor, indexer
        self.rope, self.rope_dim = config.rope, config.rope_dim
        self.scale, self.window = config.head_dim**-0.5, window
        self.attention, self.constrain = attention, constrain

    def __call__(
        self,
        x: Stream,
        tables: PositionTables,
        segment_ids: Int[Array, "batch seq"] | None,
        window: Window = None,
    ) -> Stream:
        """Attends to the tokens of a window and to entries.

        Args:
          x: Normed hidden states.
          tables: Tables of the positions.
          segment_ids: Segment of each token in a packed row; None for one segment.
          window: Attention window of this layer; None for the one of all layers.
        """
        made = self._project(x, tables)
        window = self.window if window is None else window
        if self.compressor is None:
            key, sinks = made.key[:, :, None], self._sinks()
            options = {"scale": self.scale, "window": window, "sinks": sinks}
            out = self.attention(
                made.query, key, key, segment_ids=segment_ids, **options
            )
            return self._project_back(out, tables)
        mask = causal_mask(x.shape[1], segment_ids, window)[:, 0]
        inputs = self._inputs_of_rows(x, tables, segment_ids)
        return self._attend(made, made.key, mask, inputs)

    def extend(
        self,
        x: Stream,
        tables: PositionTables,
        cache: CompressedKeyValues,
        slots: Slots,
        window: Window = None,
    ) -> tuple[Stream, CompressedKeyValues]:
        """Attends from new tokens, which follow those in a cache.

        Args:
          x: Normed hidden states of the new tokens.
          tables: Tables of their positions.
          cache: Cache of this layer.
          slots: Cache slot of each new token: its position.
          window: Attention window of this layer; None for the one of all layers.

        Returns:
          Attention output, and the cache with the new tokens.
        """
        made = self._project(x, tables)
        rows = jnp.arange(slots.shape[0])[:, None]

        def stored(old: Array, new: Array) -> Array:
            return old.at[rows, slots].set(new)

        keys, size = stored(cache.key, made.key), cache.key.shape[1]
        old = tuple(
            each for each in (cache.entries, cache.index_entries) if each is not None
        )
        inputs = tuple(
            CompressorInputs(*map(stored, held, new))
            for held, new in zip(old, self._compressor_inputs(x), strict=True)
        )
        mask = visible_slots(slots, size, self.window if window is None else window)
        entries = self._inputs_of_slots(inputs, slots, size, x.dtype)
        out = self._attend(made, keys, mask, entries)
        return out, CompressedKeyValues(keys, *inputs, *(None,) * (2 - len(inputs)))

    def _project(self, x: Stream, tables: PositionTables) -> _Projected:
        assert tables.cos is not None and tables.sin is not None
        latent = self.constrain(self.q_a_proj(x), "tokens")
        latent = self.constrain(self.q_a_norm(latent), "input")
        query = self.q_b_norm(self.q_b_proj(latent))
        key = self.constrain(self.kv_proj(x), "tokens")
        key = self.constrain(self.kv_norm(key), "input")[:, :, None]
        query, key = (
            rotate_last(heads, tables.cos, tables.sin) for heads in (query, key)
        )
        return _Projected(x, tables, latent, query, key[:, :, 0])

    def _attend(
        self,
        made: _Projected,
        keys: Keys,
        mask: Bool[Array, "#batch seq keys"],
        inputs: _EntryInputs | None,
    ) -> Stream:
        """Attends to keys of tokens, and to the entries of the full windows before.

        Args:
          made: Projections of the tokens that attend.
          keys: Keys of single tokens.
          mask: True for those that a token attends to.
          inputs: What entries are made of; None without entries.
        """
        if self.compressor is not None and inputs is not None:
            at = inputs.cos, inputs.sin, inputs.windows
            entries, seen = self.compressor.entries(inputs.made[0], *at), inputs.visible
            indexer = self.indexer
            if indexer is not None and entries.shape[1] > indexer.num_selected:
                own = indexer.compressor.entries(inputs.made[1], *at)
                seen = indexer.select(made.x, made.latent, own, made.tables, seen)
            keys = jnp.concatenate([keys, entries], axis=1)
            masks = (
                jnp.broadcast_to(each, (len(made.x), *each.shape[1:]))
                for each in (mask, seen)
            )
            mask = jnp.concatenate([*masks], axis=2)
        key, sinks = keys[:, :, None], self._sinks()
        out = attend(made.query, key, key, self.scale, mask[:, None], None, sinks)
        return self._project_back(out, made.tables)

    def _inputs_of_rows(
        self,
        x: Stream,
        tables: PositionTables,
        segment_ids: Int[Array, "batch seq"] | None,
    ) -> _EntryInputs | None:
        """Returns what the entries of rows are made of; None if no window is full."""
        seq = x.shape[1]
        if self.compressor is None or seq < self.compressor.rate:
            return None
        assert tables.cos is not None and tables.sin is not None
        made, rate = self._compressor_inputs(x), self.compressor.rate
        if segment_ids is not None:
            windows = windows_of_texts(segment_ids, rate)
            cos, sin = windows.starts(tables.cos), windows.starts(tables.sin)
            visible = windows.visible(segment_ids)
            return _EntryInputs(made, cos, sin, visible, windows)
        starts = slice(0, seq // rate * rate, rate)
        rows = jnp.arange(seq, dtype=jnp.int32)[None]
        visible = _visible(rows, rate, seq)
        return _EntryInputs(
            made, tables.cos[:, starts], tables.sin[:, starts], visible, None
        )

    def _inputs_of_slots(
        self,
        made: tuple[CompressorInputs, ...],
        slots: Slots,
        size: int,
        dtype: DTypeLike,
    ) -> _EntryInputs | None:
        """Returns what the entries of a cache are made of; None if it has none."""
        if self.compressor is None or size < self.compressor.rate:
            return None
        assert self.rope is not None
        rate = self.compressor.rate
        starts = jnp.arange(size // rate, dtype=jnp.int32)[None] * rate
        cos, sin = rope_tables(self.rope, self.rope_dim, starts, dtype)
        return _EntryInputs(made, cos, sin, _visible(slots, rate, size), None)

    def _project_back(self, out: Heads, tables: PositionTables) -> Stream:
        assert tables.cos is not None and tables.sin is not None
        out = rotate_last(out, tables.cos, -tables.sin)
        return self.o_b_proj(self.o_a_proj(out))

    def _compressor_inputs(self, x: Stream) -> tuple[CompressorInputs, ...]:
        """Returns what the compressors of the layer and of its indexer project to."""
        if self.compressor is None:
            return ()
        made = (self.compressor.project(x),)
        if self.indexer is not None:
            made += (self.indexer.compressor.project(x),)
        return made

    def _sinks(self) -> Float[Array, " heads"] | None:
        return None if self.sinks is None else self.sinks[...]


def _visible(rows: Int[Array, "#batch seq"], rate: int, size: int) -> Selected:
    """Returns the full windows of a row that end at each token or before."""
    windows = jnp.arange(size // rate, dtype=jnp.int32)
    return windows[None, None] < ((rows + 1) // rate)[..., None]


def entry_indexer_paths(config: DecoderConfig) -> tuple[str, ...]:
    """Returns the paths of the parameters of all indexers of entries.

    Args:
      config: Config of the decoder.
    """
    compressor = ("kv_proj.kernel", "gate_proj.kernel", "position_bias", "norm.scale")
    names = ("q_proj.kernel", "weights_proj.kernel")
    names += tuple(f"compressor.{name}" for name in compressor)
    return tuple(
        f"{stack.path}.self_attn.indexer.{name}"
        for stack in config.layer_stacks
        if stack.kind.compresses == "sparse"
        for name in names
    )
