"""Caches of all kinds of layers, and attention that reads a KV cache."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Float, Int

from bridge.models._attention import Window, attend
from bridge.models._config import DecoderConfig
from bridge.models._layer_kinds import LayerKind
from bridge.models._layer_state import (
    AttentionMambaState,
    CompressedKeyValues,
    CompressorInputs,
    ConvState,
    DeltaNetState,
    IndexedKeyValues,
    KeyValues,
    LayerState,
    LightningState,
    Mamba1State,
    MambaState,
    RGLRUMemory,
    RGLRUState,
    TwoKeyValues,
)

Slots = Int[Array, "batch seq"]


def empty_cache(
    config: DecoderConfig, batch: int, slots: int, dtype: DTypeLike
) -> list[LayerState | None]:
    """Returns zeroed caches for all stacks of a decoder.

    Latent attention caches its full heads, not the latent vectors.

    Args:
      config: Config of the decoder.
      batch: Number of rows.
      slots: Maximum number of tokens in a row.
      dtype: Dtype of keys and values: the dtype of the weights.

    Returns:
      One cache per stack of `config.layer_stacks`, with a leading layer dim; None for
      layers that mix no tokens, or attend to the cache of another.
    """
    made = {
        "attention": _two_key_values if config.dense_branch else key_values,
        "indexed": _indexed_key_values,
        "short_conv": _conv_state,
        "delta_net": _delta_net_state,
        "lightning": _lightning_state,
        "mamba": _mamba_state,
        "mamba1": _mamba1_state,
        "rg_lru": _rg_lru_state,
        "attention_mamba": _attention_mamba_state,
    }
    caches: list[LayerState | None] = []
    for stack in config.layer_stacks:
        name = "indexed" if stack.kind.indexes else stack.kind.mixer
        name = name if stack.kind.shared_block is None else "attention_mamba"
        dims = (len(stack.layers), batch)
        if config.compressed_attention is not None:
            made_keys = _compressed_key_values(config, stack.kind, dims, slots, dtype)
            caches.append(made_keys)
            continue
        own = config.of_kind(stack.kind)
        if name is None or stack.kind.reuses:
            caches.append(None)
        else:
            caches.append(made[name](own, dims, slots, dtype))
    return caches


def key_values(
    config: DecoderConfig, dims: tuple[int, ...], slots: int, dtype: DTypeLike
) -> KeyValues:
    """Returns zeroed keys and values.

    Args:
      config: Config of the decoder, with the sizes of the layer.
      dims: Leading dims, of which the last is the batch.
      slots: Number of keys.
      dtype: Dtype of keys and values.
    """
    heads = config.num_attention_heads if config.mla else config.num_key_value_heads
    shape = (*dims, slots, heads)
    return KeyValues(
        jnp.zeros((*shape, config.qk_dim), dtype),
        jnp.zeros((*shape, config.v_head_dim), dtype),
    )


def _two_key_values(
    config: DecoderConfig, dims: tuple[int, int], slots: int, dtype: DTypeLike
) -> TwoKeyValues:
    first, second = (key_values(config, dims, slots, dtype) for _ in range(2))
    return TwoKeyValues(first, second)


def _indexed_key_values(
    config: DecoderConfig, dims: tuple[int, int], slots: int, dtype: DTypeLike
) -> IndexedKeyValues:
    sizes = config.indexer or config.block_indexer
    assert sizes is not None
    return IndexedKeyValues(
        key_values(config, dims, slots, dtype),
        jnp.zeros((*dims, slots, sizes.head_dim), dtype),
    )


def _compressed_key_values(
    config: DecoderConfig,
    kind: LayerKind,
    dims: tuple[int, int],
    slots: int,
    dtype: DTypeLike,
) -> CompressedKeyValues:
    sizes = config.compressed_attention
    assert sizes is not None

    def zeros(width: int) -> CompressorInputs:
        shape = (*dims, slots, width)
        return CompressorInputs(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    key = jnp.zeros((*dims, slots, config.head_dim), dtype)
    if kind.compresses is None:
        return CompressedKeyValues(key)
    if kind.compresses == "heavy":
        return CompressedKeyValues(key, zeros(config.head_dim))
    index = zeros(2 * sizes.index_head_dim)
    return CompressedKeyValues(key, zeros(2 * config.head_dim), index)


def _conv_state(
    config: DecoderConfig, dims: tuple[int, int], slots: int, dtype: DTypeLike
) -> ConvState:
    del slots
    sizes = config.short_conv
    assert sizes is not None
    return ConvState(
        jnp.zeros((*dims, sizes.kernel_size - 1, config.hidden_size), dtype)
    )


def _delta_net_state(
    config: DecoderConfig, dims: tuple[int, int], slots: int, dtype: DTypeLike
) -> DeltaNetState:
    del slots
    sizes = config.delta_net
    assert sizes is not None
    before = (*dims, sizes.kernel_size - 1)
    key = (*before, sizes.num_key_heads, sizes.key_head_dim)
    memory = (*dims, sizes.num_value_heads, sizes.key_head_dim, sizes.value_head_dim)
    return DeltaNetState(
        jnp.zeros(key, dtype),
        jnp.zeros(key, dtype),
        jnp.zeros((*before, sizes.num_value_heads, sizes.value_head_dim), dtype),
        jnp.zeros(memory, jnp.promote_types(dtype, jnp.float32)),
    )


def _lightning_state(
    config: DecoderConfig, dims: tuple[int, int], slots: int, dtype: DTypeLike
) -> LightningState:
    del slots
    memory = (*dims, config.num_attention_heads, config.head_dim, config.head_dim)
    return LightningState(jnp.zeros(memory, jnp.promote_types(dtype, jnp.float32)))


def _mamba_state(
    config: DecoderConfig, dims: tuple[int, int], slots: int, dtype: DTypeLike
) -> MambaState:
    del slots
    sizes = config.mamba
    assert sizes is not None
    before = (*dims, sizes.kernel_size - 1)
    state = (*before, sizes.num_groups, sizes.state_size)
    memory = (*dims, sizes.num_heads, sizes.head_dim, sizes.state_size)
    return MambaState(
        jnp.zeros((*before, sizes.num_heads, sizes.head_dim), dtype),
        jnp.zeros(state, dtype),
        jnp.zeros(state, dtype),
        jnp.zeros(memory, jnp.promote_types(dtype, jnp.float32)),
    )


def _mamba1_state(
    config: DecoderConfig, dims: tuple[int, int], slots: int, dtype: DTypeLike
) -> Mamba1State:
    del slots
    sizes = config.mamba1
    assert sizes is not None
    memory = (*dims, sizes.num_channels, sizes.state_size)
    return Mamba1State(
        jnp.zeros((*dims, sizes.kernel_size - 1, sizes.num_channels), dtype),
        jnp.zeros(memory, jnp.promote_types(dtype, jnp.float32)),
    )


def _rg_lru_state(
    config: DecoderConfig, dims: tuple[int, int], slots: int, dtype: DTypeLike
) -> RGLRUState:
    del slots
    sizes = config.rg_lru
    assert sizes is not None
    heads, wide = (sizes.num_heads, sizes.head_dim), jnp.promote_types(dtype, "float32")
    hidden = jnp.zeros((*dims, *heads), wide)
    return RGLRUState(
        jnp.zeros((*dims, sizes.kernel_size - 1, *heads), dtype),
        RGLRUMemory(hidden, jnp.zeros(dims, jnp.bool_)),
    )


def _attention_mamba_state(
    config: DecoderConfig, dims: tuple[int, int], slots: int, dtype: DTypeLike
) -> AttentionMambaState:
    state = _mamba_state if config.mamba1 is None else _mamba1_state
    return AttentionMambaState(
        key_values(config, dims, slots, dtype), state(config, dims, slots, dtype)
    )


def attend_cached(
    query: Float[Array, "batch seq heads head_dim"],
    new: KeyValues,
    cache: KeyValues,
    slots: Slots,
    *,
    scale: float,
    window: Window = None,
    softcap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    first: Slots | None = None,
    selected: Bool[Array, "batch #kv_heads seq keys"] | None = None,
) -> tuple[Float[Array, "batch seq heads v_head_dim"], KeyValues]:
    """Writes new tokens to the cache, and attends from each to the tokens up to it.

    Args:
      query: Queries of the new tokens.
      new: Keys and values of the new tokens.
      cache: Cache of the previous tokens.
      slots: Slots of the new tokens: their positions.
      scale: Factor of the scores.
      window: Number of tokens that a query attends to; None for all previous tokens.
      softcap: Bound of the scores; None for no bound.
      sinks: Score per head that takes part in the softmax; None for no sinks.
      first: First slot that each query attends to; None for 0.
      selected: Slots that each query attends to, by key heads or of all; None for all
        slots.

    Returns:
      Weighted averages of the values, and the cache with the new tokens.
    """
    key, value = store_new(new, cache, slots)
    mask = visible_slots(slots, key.shape[1], window, first)[:, None]
    mask = mask if selected is None else mask & selected
    mixed = attend(query, key, value, scale, mask, softcap, sinks)
    return mixed, KeyValues(key, value)


def store_new(new: KeyValues, cache: KeyValues, slots: Slots) -> KeyValues:
    """Writes new tokens to the cache.

    Args:
      new: Keys and values of the new tokens.
      cache: Cache of the previous tokens.
      slots: Slots of the new tokens.
    """
    rows = jnp.arange(slots.shape[0])[:, None]
    return KeyValues(
        cache.key.at[rows, slots].set(new.key),
        cache.value.at[rows, slots].set(new.value),
    )


def visible_slots(
    slots: Slots, size: int, window: Window = None, first: Slots | None = None
) -> Bool[Array, "batch seq slots"]:
    """Returns the slots that each new token attends to.

    Args:
      slots: Slots of the new tokens.
      size: Number of slots of the cache.
      window: Attention window in tokens; None for all slots before.
      first: First slot that each token attends to; None for 0.
    """
    behind = slots[:, :, None] - jnp.arange(size, dtype=jnp.int32)[None, None, :]
    mask = behind >= 0
    if window is not None:
        mask &= behind < window
    if first is not None:
        mask &= jnp.arange(size, dtype=jnp.int32)[None, None] >= first[..., None]
    return mask
